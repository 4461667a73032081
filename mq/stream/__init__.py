"""Links over stream sockets: what `tcp`, `tls` and `shm` share.

`mq.stream.link` listens, dials and polls; `mq.stream.conn` frames messages on one
connection; `mq.stream.descriptors` lets messages carry file descriptors. A transport is
a subclass of `StreamLink` that says which sockets it makes. What lets connections in,
`mq.stream.listening`, is for links of other engines, too.
"""
