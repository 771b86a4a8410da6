"""Atomic replacement of files and directories, also through links and in mount points; locks, caches and digests. No torch.

:mod:`paths` resolves paths, :mod:`atomic` replaces files and directories, :mod:`shared` makes a file once for several processes,
:mod:`hashing` digests files while they are written.
"""
