"""Files and directories that appear whole, through links and in mount points; locks, caches and digests. No torch.

:mod:`paths` tells where things are, :mod:`atomic` replaces files and directories, :mod:`shared` makes what several processes
want once, :mod:`hashing` digests files while they are written.
"""
