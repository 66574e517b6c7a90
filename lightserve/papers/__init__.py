"""The policies of published systems, each read from its paper, behind lightserve's own memory.

They are policies as anyone's are (`--policy MODULE:CLASS`); the router knows their names alone.
"""
