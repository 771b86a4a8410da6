"""The Tinker protocol over HTTP: routes, keys, bodies within bounds, JSON and protobuf, connections."""
