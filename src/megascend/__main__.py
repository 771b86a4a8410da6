"""``python -m megascend``: the command line, where its script is not on the path."""

from megascend.apps.cli.main import main

if __name__ == "__main__":
    main()
