"""A controller of inference engines, which trainers and workers call.

From below to above, each in a file: ``ownership``: who owns which engine, pure; ``tasks``: rollouts as futures that a callback
completes; ``engines``: calls of several engines, updates and pauses; ``controller``, which undoes them; ``messages``: the form of
calls, pure; ``replies``: each call is carried out once; ``routes``, ``areal`` and ``server``, which publishes its ``address``;
``client``. ``python -m megascend.rollout.controller`` runs one.
"""
