"""How long a step takes: its shape, the model, its fit to samples, and the file it is kept in.

Shared by workers, which measure, and the router, which plans. Neither torch nor processes.
"""
