"""The command line as `python -m minedraft`."""

from minedraft.cli import main

if __name__ == "__main__":
    main()
