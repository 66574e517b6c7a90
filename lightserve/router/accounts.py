"""Whose requests are served, and how much each may have: shares of a class, and quotas of keys.

Within a class, accounts share the engine by weighted tokens: the virtual token counter of Sheng et
al., "Fairness in serving large language models", section 4. Each account has a counter of what it
has been served; of those that have requests waiting, the one with the least goes first. One that
comes back is lifted to the least of those that wait, or else to the most that any had: no share is
saved up in idle times. Accounts
are API keys; behind the key of a gateway its own clients have accounts, and share what the key has:

    root ─┬─ key "alice" ─── ""
          └─ key "gate" ─┬── "client 1"
                         └── "client 2"

Quotas are of keys, over both classes: what is used drains away evenly, within a minute all of it.

Pure. Where there is one account, as without keys, nothing is counted and nothing is reordered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lightserve.messages.frontend_router import Client, ErrorCode
from lightserve.types import RequestClass

OUTPUT_WEIGHT = 2.0
"""Computed prompt tokens that a generated one counts for (VTC, section 5.1)."""
MAX_ACCOUNTS = 1024
"""Behind one key: beyond it those are forgotten that have had no request for longest."""
MINUTE_S = 60.0


class Account:
    """A node of the tree: a counter, and the accounts behind it."""

    __slots__ = (
        "last_served",
        "members",
        "name",
        "num_live",
        "num_waiting",
        "num_waiting_tokens",
        "parent",
        "served",
    )

    def __init__(self, name: str, parent: Account | None) -> None:
        """`parent` None: this is the root."""
        self.name = name
        self.parent = parent
        self.served = 0.0
        """Weighted tokens."""
        self.num_live = 0
        """Requests that the router has."""
        self.num_waiting = 0
        """Waiting requests that never ran."""
        self.num_waiting_tokens = 0
        """Prompt tokens of requests that never ran."""
        self.members: dict[str, Account] = {}
        """Accounts behind the key, those idle for longest first."""
        self.last_served = 0.0
        """Largest counter with which a member had nothing waiting any more."""

    @property
    def key(self) -> Account:
        """The account of the key that this is behind."""
        assert self.parent is not None
        return self.parent

    @property
    def rank(self) -> tuple[float, float]:
        """Order of service: keys by served tokens, then accounts behind a key."""
        return self.key.served, self.served

    def member(self, name: str, *, joins: bool = True) -> Account:
        """Return the account of this name, made if there is none; `joins`: to be found again."""
        if (found := self.members.get(name)) is None:
            found = Account(name, self)
            if not joins:
                return found
            if len(self.members) >= MAX_ACCOUNTS:
                idle = next((a for a in self.members.values() if a.num_live == 0), None)
                if idle is not None:
                    del self.members[idle.name]
            self.members[name] = found
        return found

    def wait(self, num_tokens: int) -> None:
        """Take in that a request begins to wait, with so many tokens in its prompt."""
        account = self
        while (parent := account.parent) is not None:
            if account.num_waiting == 0:
                account.served = max(account.served, parent.level())
            account.num_waiting += 1
            account.num_waiting_tokens += num_tokens
            account = parent

    def leave(self, num_tokens: int) -> None:
        """Take in that such a request waits no more."""
        account = self
        while (parent := account.parent) is not None:
            account.num_waiting -= 1
            account.num_waiting_tokens -= num_tokens
            if account.num_waiting == 0:
                parent.last_served = max(parent.last_served, account.served)
            account = parent

    def level(self) -> float:
        """Return the counter to which a member is lifted that has nothing waiting.

        The least of those that have. Where none has, all of them got what they wanted, so that none
        is owed anything: then the most that any had.
        """
        waiting = [each.served for each in self.members.values() if each.num_waiting]
        if waiting:
            return min(waiting)
        live = (each.served for each in self.members.values() if each.num_live)
        return max(self.last_served, *live, 0.0)

    def hold(self) -> None:
        """Take in that the router has one more request of this account."""
        for account in (self, self.key):
            account.num_live += 1

    def release(self) -> None:
        """Take in that a request has ended; an account without one is idle from now on."""
        for account in (self, self.key):
            account.num_live -= 1
            if account.num_live == 0 and account.parent is not None:
                members = account.parent.members
                members[account.name] = members.pop(account.name)

    def charge(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count what has been computed for it."""
        weight = num_prompt_tokens + OUTPUT_WEIGHT * num_output_tokens
        self.served += weight
        self.key.served += weight


class Share(NamedTuple):
    """Shares of a bounded queue that an account holds."""

    of_key: float
    own: float


class QueueBounds(NamedTuple):
    """Bounds of a class's queue."""

    max_requests: int
    max_tokens: int


def share_of_queue(account: Account, bounds: QueueBounds, *, joining: int | None = None) -> Share:
    """Return the larger one of an account's shares of a queue's requests and of its tokens.

    With `joining` one more request waits, of so many tokens.
    """
    of_key, own = (
        max(
            (each.num_waiting + (joining is not None)) / bounds.max_requests,
            (each.num_waiting_tokens + (joining or 0)) / bounds.max_tokens,
        )
        for each in (account.key, account)
    )
    return Share(of_key, own)


class _Used:
    """Use within the last minute: a whole quota drains in one."""

    __slots__ = ("since_s", "used")

    def __init__(self, now_s: float) -> None:
        self.used = 0.0
        self.since_s = now_s

    def left(self, per_minute: int, now_s: float) -> float:
        """Return what has not drained since."""
        return max(0.0, self.used - (now_s - self.since_s) * per_minute / MINUTE_S)

    def add(self, count: int, per_minute: int, now_s: float) -> None:
        """Take off what has drained since, and add so much; without a quota nothing counts."""
        self.used = self.left(per_minute, now_s) + count if per_minute else 0.0
        self.since_s = now_s


class Refusal(NamedTuple):
    """Why a request may not come now; numbers as in `RequestDelta`."""

    error: ErrorCode
    retry_after_s: float = 0.0
    max_tokens: int = 0


class Budget:
    """Use of a key's quotas."""

    __slots__ = ("requests", "tokens")

    def __init__(self, now_s: float) -> None:
        self.requests = _Used(now_s)
        self.tokens = _Used(now_s)

    def refusal(self, client: Client, now_s: float) -> Refusal | None:
        """Return why a key may not ask for more now; None: it may."""
        for error, most, used in (
            (ErrorCode.REQUEST_QUOTA, client.requests_per_minute, self.requests),
            (ErrorCode.TOKEN_QUOTA, client.tokens_per_minute, self.tokens),
        ):
            if most and (missing := used.left(most, now_s) + 1 - most) > 0:
                return Refusal(error, missing * MINUTE_S / most)
        return None

    def note_request(
        self, client: Client, now_s: float, num_prompt_tokens: int, *, is_first: bool
    ) -> None:
        """Count a request that was let in, and its prompt."""
        self.requests.add(is_first, client.requests_per_minute, now_s)
        self.tokens.add(num_prompt_tokens, client.tokens_per_minute, now_s)

    def take_back(self, num_prompt_tokens: int, *, is_first: bool) -> None:
        """Count one no more that had to leave before it began."""
        self.requests.used = max(0.0, self.requests.used - is_first)
        self.tokens.used = max(0.0, self.tokens.used - num_prompt_tokens)


class Computed(NamedTuple):
    """Tokens that a step computes for a request."""

    account: Account | None
    budget: Budget | None
    num_prompt_tokens: int
    num_output_tokens: int


class Accounts:
    """All accounts and budgets; see the module."""

    def __init__(self) -> None:
        self._roots = {request_class: Account("", None) for request_class in RequestClass}
        self._budgets: dict[str, Budget] = {}
        """By key; as many as the file of keys has had names with quotas."""
        self._counts = False
        """Whether what is computed has to be counted: once there are several, or a budget."""

    def find(self, client: Client, request_class: RequestClass, *, joins: bool = True) -> Account:
        """Return the account of a client in a class, made if there is none.

        `joins`: whether it is found again; if not, nothing has changed.
        """
        root = self._roots[request_class]
        key = root.member(client.key, joins=joins)
        account = key.member(client.fairness_id, joins=joins)
        self._counts |= len(root.members) > 1 or len(key.members) > 1
        return account

    def budget(self, client: Client, now_s: float, *, joins: bool = True) -> Budget | None:
        """Return what a client's requests count against; None: its key has no quotas.

        `joins` as in `find`.
        """
        if not (client.requests_per_minute or client.tokens_per_minute):
            return None
        found = self._budgets.get(client.key) or Budget(now_s)
        if joins:
            self._counts, self._budgets[client.key] = True, found
        return found

    def charge(self, computed: Iterable[Computed]) -> None:
        """Count what a step that is sent computes for each."""
        if not self._counts:
            return
        for account, budget, num_prompt_tokens, num_output_tokens in computed:
            if account is not None:
                account.charge(num_prompt_tokens, num_output_tokens)
            if budget is not None:
                budget.tokens.used += num_output_tokens
