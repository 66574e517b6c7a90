#!/usr/bin/env python
"""Loads any OpenAI-compatible server: `python bench/load_test.py --help`."""

from loadtest.cli import main

if __name__ == "__main__":
    main()
