"""Applications on the public interface of mq, measured over the main backends."""
