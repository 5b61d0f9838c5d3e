"""HTTP/1.1 between clients, proxy and engines: sockets, parsing, streams."""
