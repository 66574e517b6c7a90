"""`python -m lightserve`: the same as the command `lightserve`."""

from lightserve.cli.main import main

if __name__ == "__main__":
    main()
