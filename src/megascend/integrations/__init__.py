"""Programs of others that megascend plugs into, one file each, which imports the program it is for."""
