"""Real-time tokens by their deadlines, best-effort ones in all the time that is left.

One time limit per step (mechanisms C3, E2): the smallest residual among tokens that this step
completes and that can still be in time; token budgets are the inverse of the cost model at that
limit (A2, A4), so that prompts fill it exactly. Slack that early tokens bought (architecture 7)
is what long chunks and best-effort work live on.

    1. real-time decodes: they make the limit
    2. real-time prompts that can still be in time, by residual, one cut where the limit ends;
       long ones one after the other (`one_long_at_once`)
    3. real-time prompts that are late anyway; those that have not started only while memory is
       left for arrivals that can be in time (`turn_of_late`)
    4. best-effort decodes, prompts in progress, those that resume, newcomers, the best of the next
       few first (`batch_order`)

Decodes with time to spare give way to who would be late beside them, and, where deadlines limit a
step, to 4 if that gains tokens (B3, B7; `rescue`, `make_room`).
Best-effort jobs with a completion time go with 1 and 2 while they are urgent (`promote`).

In overload this order keeps goodput: sorted by deadline alone, everybody would be a little late.
While late ones are fewer than `--late-min-share` of all that run, one of them starts before those
of 2, and their prompts head such a share of the steps: whoever runs gets a token in every step, so
that this is a share of time.
"""

from lightserve.router.policies.unified.policy import UnifiedOptions, UnifiedPolicy

__all__ = ["UnifiedOptions", "UnifiedPolicy"]
