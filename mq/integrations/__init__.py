"""Other frameworks over mq: each module needs its framework, and imports it."""
