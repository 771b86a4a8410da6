"""Controller of inference engines: a service for trainers and rollout workers.

From the bottom up, each in a file: ``ownership``: claims on engines, pure; ``tasks``: rollouts as futures that a callback
completes; ``engines``: concurrent calls, updates and pauses; ``controller``, which undoes them on failure; ``messages``: the
format of calls, pure; ``replies``: idempotency; ``routes``, ``areal`` and ``server``, which publishes its ``address``;
``client``. ``python -m megascend.apps.rl.rollout.controller`` runs one.
"""
