"""``--durable``: write-ahead storage of accepted requests in a database, replayed after a restart."""
