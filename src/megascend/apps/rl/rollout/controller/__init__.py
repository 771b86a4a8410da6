"""Controller of inference engines: a service for trainers and rollout workers.

From the bottom up, each in a file: ``pauses``, which end with their leases; ``tasks``: rollouts as futures that a callback
completes; ``controller``: claims on engines, whose calls are undone on failure; ``messages``: the format of calls, pure;
``replies``: idempotency; ``routes``, ``areal`` and ``server``, which publishes its ``address``; ``client``.
``python -m megascend.apps.rl.rollout.controller`` runs one.
"""
