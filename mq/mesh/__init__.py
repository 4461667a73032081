"""Publish/subscribe with the whole contract, over any `mq.transport.Link`."""
