"""A controller of inference engines, which trainers and workers call.

From below to above, each in a file: ``clock``; ``ownership``: who owns which engine, pure; ``tasks``: rollouts as futures
that a callback completes; ``engine_calls``, ``updates`` and ``pauses``: what is done to engines; ``controller``, which undoes it;
``messages``: what is said, pure; ``replies``: each call is carried out once; ``http_server``: bounded HTTP; ``routes`` and
``server``, which publishes its ``address``; ``async_client`` and ``client``.
"""
