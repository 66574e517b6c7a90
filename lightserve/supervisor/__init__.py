"""The parent of all processes: starts them, waits until they are ready, watches, restarts, drains.

`startup` checks what can be checked before anything runs, `spawn` starts one child, `fleet`
decides what a death or a message means, `loop` waits for events.
"""
