"""``--durable``: what the service promises is in a database in storage before it is promised, and a restart repeats it."""
