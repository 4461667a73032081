"""Applications on the public interface of mq, measured over every backend."""
