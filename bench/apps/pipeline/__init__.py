"""Pipeline parallelism: ResNet-50 in two processes."""
