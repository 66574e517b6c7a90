"""Options of what the router decides: targets, policy, admission, bounds of the queues; presets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lightserve.config.fields import Need, option, profile_option, simulate_option, unmet_need
from lightserve.config.options import split_names
from lightserve.errors import ConfigError
from lightserve.types import MAX_DRAFTS

_OF_PAPERS = ("accelgen", "bros", "echo")
PACED_POLICIES = ("priority", "unified")

CLASS_BLIND_POLICIES = ("chunked", "fcfs", "mlfq")
PARTS = {
    "accelgen": ("batching", "chunking", "exclusive", "ordering"),
    "round-robin": ("chunking",),
}
"""Parts of policies that `--without` may leave out."""

AUTO_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
"""--max-num-batched-tokens by device, unless it is given. A GPU has read its weights by the time
that it has computed some 300 tokens, and deadlines limit a step sooner than this. On a CPU it may
be less, by the profile of step times."""


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    """See the module's docstring."""

    ttft_slo_ms: float = option(
        0.0,
        "Target of real-time requests: time to the first token; 0 sets none.",
        low=0.0,
        section="Targets",
    )
    tpot_slo_ms: float = option(
        0.0, "Target of real-time requests: mean time per output token; 0 sets none.", low=0.0
    )
    mtpot_slo_ms: float = option(
        0.0,
        "Target of real-time requests: largest gap between tokens; 0 takes four times"
        " --tpot-slo-ms.",
        low=0.0,
    )
    min_ttft_slo_ms: float = option(
        0.0, "Least target of the time to the first token that a request may ask for.", low=0.0
    )
    min_tpot_slo_ms: float = option(
        0.0, "Least target of times per token, mean or largest, that it may ask for.", low=0.0
    )
    slo_clock: str = simulate_option(
        "curve",
        "Deadlines of tokens: curve (early tokens give time to later ones, up to the largest"
        " gap) or gap (each token is due the mean time after the one before).",
        choices=("curve", "gap"),
        needs=(Need("policy", ("unified", *_OF_PAPERS)),),
    )
    max_num_seqs: int = profile_option(
        256, "Most sequences that run at once.", low=1, high=65536, section="Steps and policy"
    )
    max_num_batched_tokens: int = profile_option(
        0,
        "Most new tokens in one step: the budget that prefill chunks fill. 0 takes 8192 on a"
        " GPU; on a CPU the best size by the profile of step times, or 512; and no less than"
        " --max-num-seqs.",
        low=0,
        high=1_048_576,
    )
    max_be_seqs: int = simulate_option(
        0, "Most best-effort sequences that run at once; 0 sets no limit of their own.", low=0
    )
    policy: str = option(
        "unified",
        "Order of requests in a step: unified (real-time tokens by their deadlines, best-effort"
        " ones in the time that is left), priority (real-time before best-effort), sjf (like"
        " priority, shortest prompts first), round-robin (the classes in turn). Three policies"
        " know no classes: chunked (decodes, then chunks of prompts in order of arrival), fcfs"
        " (whole prompts, else decodes), mlfq (requests with the least service first). accelgen,"
        " bros and echo are the policies of the papers of these names (--preset sets the options"
        " that go with them). MODULE:CLASS is a policy of your own, from a module that"
        " PYTHONPATH finds.",
        choices=(*CLASS_BLIND_POLICIES, *_OF_PAPERS, "priority", "round-robin", "sjf", "unified"),
        takes_class=True,
    )
    be_order: str = simulate_option(
        "auto",
        "Order in which best-effort requests start: arrival, or sharing (prompts that begin"
        " like cached ones first, every sixteenth time the oldest; not with policies that know"
        " no classes, nor accelgen). auto: sharing with --policy unified and echo, arrival with"
        " all others.",
        choices=("auto", "arrival", "sharing"),
    )
    late_min_share: float = simulate_option(
        0.1,
        "unified: share of the steps in which real-time requests with a late first token go"
        " first. Beyond capacity the share falls by half until it matches the excess that it can"
        " serve.",
        low=0.0,
        high=0.9,
        needs=(Need("policy", ("unified",)),),
    )
    be_min_share: float = simulate_option(
        0.0,
        "unified: least share of step time that best-effort requests get while they want more,"
        " whatever real-time requests miss by it; memory is another matter.",
        low=0.0,
        high=0.9,
        needs=(Need("policy", ("unified",)),),
    )
    long_prompt_tokens: int = simulate_option(
        4096,
        "unified, accelgen: of real-time prompts with at least so many tokens to compute, one"
        " is in progress at a time (unified: one of each key), unless another is urgent. 0: no"
        " such rule.",
        low=0,
        needs=(Need("policy", ("unified", "accelgen")),),
    )
    pace_ms: float = simulate_option(
        33.0,
        "unified, priority: time between tokens of real-time requests without targets while"
        " real-time prompts run beside them, or twice a step of the decodes alone if that is"
        " longer. It is no target: nothing is refused or counted by it. 0: no pace.",
        low=0.0,
        high=60_000.0,
        needs=(Need("policy", PACED_POLICIES),),
    )
    be_stretch: float = simulate_option(
        1.5,
        "unified, priority: beside such requests, a step with best-effort work takes at most so"
        " many times the time of their decodes alone.",
        low=1.0,
        high=1000.0,
        needs=(Need("policy", PACED_POLICIES),),
    )
    without: str = simulate_option(
        "",
        "Parts to be left out, separated by commas; accelgen: batching, chunking, exclusive,"
        " ordering; round-robin: chunking (prompts go whole).",
        needs=(Need("policy", ("accelgen", "round-robin")),),
    )
    victims: str = simulate_option(
        "newest",
        "Requests of a class that lose memory first, except its oldest: newest, emptiest"
        " (best-effort: most free slots in the last block; real-time: most time left), latest"
        " (most time left), cheapest (soonest recomputed for the memory that it gives, and far"
        " from its end).",
        choices=("newest", "emptiest", "latest", "cheapest"),
    )
    admission: str = option(
        "risk",
        "Rule for starting requests, by memory.",
        choices=("conservative", "aggressive", "ema", "past-future", "risk"),
        section="Admission and queues",
    )
    overcommit: float = option(
        1.0,
        "conservative: how many times the KV pool may be promised.",
        low=1.0,
        high=16.0,
        needs=(Need("admission", ("conservative",)),),
    )
    watermark: float = option(
        0.95,
        "aggressive: share of the KV pool that newcomers may fill.",
        low=0.01,
        high=1.0,
        needs=(Need("admission", ("aggressive",)),),
    )
    reserve: float = option(
        0.05,
        "past-future: share of the KV pool kept free of forecasts.",
        low=0.0,
        high=0.9,
        needs=(Need("admission", ("past-future",)),),
    )
    samples: int = option(
        5,
        "past-future: most futures drawn for a small batch.",
        low=1,
        high=1024,
        needs=(Need("admission", ("past-future",)),),
    )
    rt_memory_risk: float = option(
        0.02,
        "risk: share of real-time requests that memory may be taken from.",
        low=0.0,
        high=1.0,
        needs=(Need("admission", ("risk",)),),
    )
    be_memory_risk: float = option(
        0.2,
        "risk: share of best-effort requests that memory may be taken from.",
        low=0.0,
        high=1.0,
        needs=(Need("admission", ("risk",)),),
    )
    rt_max_waiting_requests: int = option(
        4096, "Most real-time requests that wait in the router; more get a 429.", low=1
    )
    rt_max_waiting_tokens: int = option(
        4_194_304, "Most prompt tokens of waiting real-time requests; more get a 429.", low=1
    )
    be_max_waiting_requests: int = option(
        65536, "Most best-effort requests that wait in the router; more get a 429.", low=1
    )
    be_max_waiting_tokens: int = option(
        67_108_864, "Most prompt tokens of waiting best-effort requests; more get a 429.", low=1
    )
    window: int = simulate_option(
        1000,
        "past-future, risk: number of finished outputs whose lengths are remembered, of all"
        " requests together and of each key.",
        low=1,
        high=1_000_000,
        needs=(Need("admission", ("past-future", "risk")),),
    )
    max_parameter_bytes: int = option(
        268_435_456,
        "Most memory in the router for allowed token ids, biases, constraints and images of all"
        " requests of a class; above it requests get a 429. All choices of a request share them.",
        low=1,
    )
    rt_kv_deviations: float = simulate_option(
        0.0,
        "KV memory that best-effort requests leave free: the recent mean use of real-time"
        " requests plus so many standard deviations. 0 leaves none.",
        low=0.0,
        high=10.0,
        needs=(Need("policy", ("priority", "sjf", "unified", *_OF_PAPERS)),),
    )

    speculation: str = simulate_option(
        "off",
        "Guesses of the next tokens of a request, several of which one step verifies: off, ngram"
        " (what followed its last tokens where these stood before in its prompt or output), suffix"
        " (there, and in recent answers to requests of its key), or mtp (the layer of the model"
        " that is made for it). Guesses change no answer.",
        choices=("off", "ngram", "suffix", "mtp"),
        section="Speculation",
        needs=(Need("block_owner", ("two-ended",)),),
    )
    max_draft_tokens: int = simulate_option(
        MAX_DRAFTS,
        "Most guesses of a request in a step; the router takes as many as pay.",
        low=1,
        high=MAX_DRAFTS,
        needs=(Need("speculation", ("ngram", "suffix", "mtp")),),
    )

    @property
    def drafts_per_row(self) -> int:
        """Most drafts of a request in a step; 0: none has any."""
        return 0 if self.speculation == "off" else self.max_draft_tokens

    @property
    def has_draft_head(self) -> bool:
        """A layer of the model guesses tokens: `--speculation mtp`."""
        return self.speculation == "mtp"

    def be_by_sharing(self) -> bool:
        """Whether best-effort requests start by what is cached of them."""
        by_default = "sharing" if self.policy in ("echo", "unified") else "arrival"
        return (by_default if self.be_order == "auto" else self.be_order) == "sharing"

    @property
    def keeps_pace(self) -> bool:
        """Whether steps leave real-time decodes without targets a pace."""
        return self.policy in PACED_POLICIES and self.pace_ms > 0

    def max_tokens_of_step(self, device_type: str) -> int:
        """Return the largest token budget of a step where workers compute on "cpu" or "cuda".

        Workers, who know their device and its step times, tell the router what to take.
        """
        default = AUTO_BATCHED_TOKENS[device_type]
        return self.max_num_batched_tokens or max(default, self.max_num_seqs)

    def drafted_tokens_of_step(self, device_type: str) -> int:
        """Return the most tokens of rows with guesses that a step has, see `max_tokens_of_step`."""
        most = self.max_num_seqs * (1 + self.drafts_per_row)
        return min(self.max_tokens_of_step(device_type), most) if self.drafts_per_row else 0

    def check_scheduling(self) -> None:
        """Refuse targets that contradict each other, and options that would have no effect."""
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens must be at least --max-num-seqs ({self.max_num_seqs}),"
                f" got {self.max_num_batched_tokens}"
            )
        if 0 < self.mtpot_slo_ms < self.tpot_slo_ms:
            raise ConfigError(
                f"--mtpot-slo-ms must be at least --tpot-slo-ms ({self.tpot_slo_ms:g}),"
                f" got {self.mtpot_slo_ms:g}"
            )
        for part in split_names(self.without):
            if part not in (parts := PARTS.get(self.policy, (part,))):
                raise ConfigError(f"--without must be some of {', '.join(parts)}, got {part!r}")
        if self.be_order == "sharing" and self.policy in (*CLASS_BLIND_POLICIES, "accelgen"):
            raise ConfigError(
                "--be-order sharing needs a policy that knows classes and has no order of its own,"
                f" got --policy {self.policy!r}"
            )
        if self.pace_ms == 0 and self.be_stretch != SchedulingOptions.be_stretch:
            raise ConfigError(
                f"--be-stretch {self.be_stretch:g} needs a pace, got --pace-ms {self.pace_ms:g}"
            )


# What goes together in the systems of four papers: `--preset`.
#
# A preset is the policy and, beside it, what that paper does with memory: who may start, what is
# cached, what becomes of those that lose memory, in which order, and what targets mean. Flags and
# lines of a file stand over it; what only its own policy or admission rule has a use for goes with
# them.

PRESETS: dict[str, dict[str, Any]] = {
    # Blocks are found when they are needed (section V-B), not forecast; the batch is bounded by
    # requests, hardly by tokens; each token has its time after the one before (section IV-A).
    "bros": {
        "policy": "bros",
        "slo_clock": "gap",
        "max_num_batched_tokens": 4096,
        "admission": "aggressive",
        "watermark": 1.0,
        "cache_policy": "off",
        "preemption": "checkpoint",
        "block_owner": "two-ended",
        "block_size": 16,
        "victims": "emptiest",
    },
    # Sections 4.2, 5.3 and 6; what the paper leaves to vLLM is vLLM's: 1 % of blocks stay free.
    "echo": {
        "policy": "echo",
        "slo_clock": "curve",
        "be_order": "sharing",
        "admission": "aggressive",
        "watermark": 0.99,
        "cache_policy": "task-aware",
        "preemption": "recompute",
        "rt_kv_deviations": 2.0,
    },
    # Section 4; overflow and preemption are vLLM's (section 5), and who is preempted is what
    # section 8 wishes for.
    "accelgen": {
        "policy": "accelgen",
        "slo_clock": "gap",
        "admission": "aggressive",
        "watermark": 0.99,
        "cache_policy": "off",
        "preemption": "recompute",
        "victims": "cheapest",
    },
    # LightLLM: first come, first served, prompts first, one token per slot (sections 3 and 4).
    "past-future": {
        "policy": "fcfs",
        "admission": "past-future",
        "cache_policy": "off",
        "preemption": "recompute",
        "block_size": 1,
    },
}


def preset_values(
    name: str | None, *, given: Collection[str], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options that a preset sets; None: none.

    Args:
        name: of the preset.
        given: options that were given otherwise: they stand over it.
        values: all options, for those.
    """
    if name is None:
        return {}
    options = {option: PRESETS[name][option] for option in PRESETS[name] if option not in given}
    known, specs = {**values, **options}, SchedulingOptions.__dataclass_fields__
    return {
        option: value
        for option, value in options.items()
        if option not in specs or unmet_need(specs[option], known) is None
    }
