"""Log-probabilities of prompts: how many a step may compute, and which are news. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.messages.common import TokenLogprob
from lightserve.messages.router_worker import MAX_PROMPT_LOGPROB_POSITIONS
from lightserve.router.reasons import Reason, Skips
from lightserve.router.request import Request
from lightserve.router.shares import Allotment, Share


def cap_positions(shares: Sequence[Share], skips: Skips) -> list[Share]:
    """Cut the chunks of prompts whose log-probabilities are wanted to the step's limit."""
    chunks = [share for share in shares if isinstance(share, Allotment)]
    if not [r for r, _ in chunks if r.sampling.num_prompt_logprobs is not None]:
        return list(shares)
    num_left = MAX_PROMPT_LOGPROB_POSITIONS
    capped: list[Share] = []
    for share in shares:
        if not isinstance(share, Allotment):
            capped.append(share)
            continue
        request, chunk = share
        if request.wants_prompt_logprobs:
            chunk = min(chunk, num_left)
            num_left -= chunk
        if chunk > 0:
            capped.append(Allotment(request, chunk))
        else:
            skips.note(request, Reason.TOKENS)
    return capped


def take_news(
    request: Request, start_position: int, logprobs: list[TokenLogprob]
) -> list[TokenLogprob]:
    """Return the log-probabilities that have not been sent yet, and count them as sent.

    `logprobs` are those of prompt tokens start_position+1 …; a preempted request computes some
    of them twice.
    """
    num_known = request.num_prompt_logprobs_sent - start_position
    news = logprobs[max(0, num_known) :]
    request.num_prompt_logprobs_sent += len(news)
    return news
