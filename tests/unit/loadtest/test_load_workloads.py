"""What the load client sends and when: arrivals, lengths, traces, shared prefixes, texts."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lightserve.errors import ConfigError
from lightserve.loadtest.options import ArrivalKind, Traffic
from lightserve.loadtest.session import make_plans
from lightserve.loadtest.workload import (
    UNCALIBRATED,
    UNIQUE,
    WORDS,
    LengthDistribution,
    Plan,
    PromptMaker,
    Segment,
    arrival_offsets,
    calibrate,
    load_trace,
    make_plan,
    parse_images,
    trace_names,
    trace_offsets,
)

COUNT = 20_000


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize(
    ("kind", "burstiness", "variation"),
    [
        (ArrivalKind.POISSON, 1.0, 1.0),
        (ArrivalKind.GAMMA, 1.0, 1.0),
        (ArrivalKind.GAMMA, 3.0, 3.0),
        (ArrivalKind.GAMMA, 0.3, 0.3),
        (ArrivalKind.GAMMA, 0.0, 0.0),
        (ArrivalKind.CONSTANT, 1.0, 0.0),
    ],
)
def test_gaps_have_the_rate_and_variation_asked_for(
    kind: ArrivalKind, burstiness: float, variation: float
) -> None:
    offsets = arrival_offsets(kind, rate_per_s=5.0, burstiness=burstiness, count=COUNT, rng=rng())
    gaps = np.diff(offsets)
    assert len(offsets) == COUNT and offsets[0] >= 0 and gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.05 * max(variation, 0.1))
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.06, abs=1e-6)


def test_trace_times_are_stretched_by_factor_or_to_a_rate() -> None:
    times = np.array([100.0, 101.0, 105.0])
    assert trace_offsets(times, time_scale=None, rate_per_s=None).tolist() == [0, 1, 5]
    assert trace_offsets(times, time_scale=0.1, rate_per_s=None).tolist() == pytest.approx(
        [0, 0.1, 0.5]
    )
    assert trace_offsets(times, time_scale=None, rate_per_s=4.0).tolist() == pytest.approx(
        [0, 0.1, 0.5]
    )


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"),
    [
        ("17", 17, 17, 17),
        ("10:30", 10, 30, 20),
        ("uniform:10,30", 10, 30, 20),
        ("normal:100,5", 70, 130, 100),
        ("exponential:50", 1, 1000, 50),
        ("loguniform:10,1000", 10, 1000, 990 / np.log(100)),
        ("lognormal:100,0.5", 5, 2000, 100 * np.exp(0.125)),
    ],
)
def test_lengths(text: str, low: int, high: int, mean: float) -> None:
    lengths = LengthDistribution.parse(text).draw(rng(), COUNT)
    assert lengths.dtype == np.int64
    assert low <= lengths.min() and lengths.max() <= high
    assert lengths.mean() == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "a", "3:", "30:10", "normal:5", "normal:5,-1", "zipf:3", "nan", "1:inf"]
)
def test_bad_lengths(text: str) -> None:
    with pytest.raises(ConfigError):
        LengthDistribution.parse(text)


@pytest.mark.parametrize("name", trace_names())
def test_every_trace_of_the_repository_can_be_read(name: str) -> None:
    trace = load_trace(name, num_rows=300)
    assert len(trace) == (120 if name == "burstgpt_burst120" else 300)
    assert trace.prompt_tokens.min() >= 1 and trace.output_tokens.min() >= 1
    assert (trace.times_s is None) == name.endswith("_lengths")
    if trace.blocks is not None:
        blocks = np.array([len(ids) for ids in trace.blocks])
        assert np.array_equal(blocks, -(-trace.prompt_tokens // 512))


@pytest.mark.parametrize(
    "content",
    ["", "a,b\n1,2\n", "prompt_tokens,output_tokens\n", "prompt_tokens,output_tokens\n0,3\n",
     "t,prompt_tokens,output_tokens\n5,1,1\n4,1,1\n", "prompt_tokens,output_tokens\n3\n"],
)  # fmt: skip
def test_files_that_are_no_traces(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.csv").write_text(content)
    with pytest.raises(ConfigError):
        load_trace(str(tmp_path / "bad.csv"))
    with pytest.raises(ConfigError, match="azure2023_conv"):
        load_trace("no_such_trace")


def plan(**fields: object) -> Plan:
    values = {"arrivals": ArrivalKind.POISSON, "rate": 10.0} | fields
    return make_plan(Traffic(**values), rng())


def totals(made: Plan) -> list[int]:
    return [sum(segment.num_tokens for segment in segments) for segments in made.segments]


def test_a_plan_of_a_trace_keeps_its_lengths_scaled_and_cut() -> None:
    trace = load_trace("azure2023_conv", first_row=5, num_rows=50)
    made = plan(
        trace="azure2023_conv", first_row=5, num_requests=50, length_scale=0.5,
        max_prompt_tokens=300, arrivals=ArrivalKind.TRACE, rate=None, time_scale=0.5,
    )  # fmt: skip
    wanted = np.minimum(300, np.maximum(1, np.rint(trace.prompt_tokens * 0.5)))
    assert totals(made) == wanted.tolist()
    assert made.offsets_s is not None and trace.times_s is not None
    assert np.allclose(made.offsets_s, (trace.times_s - trace.times_s[0]) * 0.5)


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_blocks_of_a_trace_become_shared_prefixes_of_the_right_length(scale: float) -> None:
    trace = load_trace("mooncake_conversation", num_rows=60)
    made = plan(trace="mooncake_conversation", num_requests=60, length_scale=scale)
    wanted = np.maximum(1, np.rint(trace.prompt_tokens * scale))
    assert np.abs(np.array(totals(made)) - wanted).max() <= 1
    assert all(segments[0].key == 0 for segments in made.segments)  # one system prompt


def test_pictures() -> None:
    assert parse_images("0") == (0, 640, 480) and parse_images(" 2:32x24 ") == (2, 32, 24)
    for text in ("", "-1", "2:", "2:32", "2:0x24", "2:32x0", "1.5", "100", "2:10000x1"):
        with pytest.raises(ConfigError, match="--images must be a count and perhaps a size"):
            parse_images(text)
    made = PromptMaker(UNCALIBRATED, 5)
    files = [base64.b64decode(made.picture(32, 24).partition(",")[2]) for _ in range(3)]
    assert len(set(files)) == 3
    for file in files:
        with Image.open(io.BytesIO(file)) as image:
            assert (image.format, image.mode, image.size) == ("PNG", "RGB", (32, 24))
    assert made.text([Segment(1, 5)]) == PromptMaker(UNCALIBRATED, 5).text([Segment(1, 5)])


def test_documents_are_shared_and_questions_are_not() -> None:
    made = plan(documents=3, questions=4, document_tokens="100:200", prompt_tokens="20")
    keys = [segments[0].key for segments in made.segments]
    assert len(made) == 12 and sorted(map(keys.count, set(keys))) == [4, 4, 4]
    assert all(segments[1] == Segment(UNIQUE, 20) for segments in made.segments)
    grouped = plan(documents=3, questions=4, question_order="grouped")
    order = [segments[0].key for segments in grouped.segments]
    assert order == sorted(order) and keys != sorted(keys)


def test_durations_end_arrivals_and_a_share_is_best_effort() -> None:
    made = plan(duration_s=100.0, be_share=0.3)
    assert made.offsets_s is not None and made.offsets_s[-1] < 100
    assert len(made) == pytest.approx(1000, rel=0.1)
    assert made.is_be.mean() == pytest.approx(0.3, abs=0.05)


def test_an_endless_open_loop_ends_with_the_first_traffic() -> None:
    first = Traffic(arrivals=ArrivalKind.CONSTANT, rate=10.0, num_requests=51)
    other = Traffic(arrivals=ArrivalKind.CONSTANT, rate=2.0, request_class="be")
    plans = make_plans([first, other], 0)
    assert [len(made) for made in plans] == [51, 10]
    with pytest.raises(ConfigError):
        make_plans([other], 0)


def word_cost(word: str) -> int:
    return 1 + len(word) % 3


def test_texts_have_the_wanted_length_whatever_words_cost() -> None:
    """A tokenizer that it knows only through counts: 1 to 3 tokens a word, 11 besides."""

    async def count_tokens(text: str) -> int:
        return 11 + sum(map(word_cost, text.split()))

    calibration = asyncio.run(calibrate(count_tokens))
    assert calibration.is_measured
    maker = PromptMaker(calibration, 3)
    for wanted in (15, 100, 1000, 20_000, 2_000_000):
        text = maker.text([Segment(UNIQUE, wanted)])
        assert asyncio.run(count_tokens(text)) == pytest.approx(wanted, abs=2, rel=0.005)


def test_without_usage_a_word_is_taken_for_a_token() -> None:
    async def count_tokens(_: str) -> None:
        return None

    calibration = asyncio.run(calibrate(count_tokens))
    assert not calibration.is_measured
    assert len(PromptMaker(calibration, 0).text([Segment(UNIQUE, 50)]).split()) == 50


def test_equal_keys_are_equal_texts_and_all_others_differ() -> None:
    calibration = asyncio.run(calibrate(_one_token_per_word))
    maker = PromptMaker(calibration, 1)
    prompts = [maker.text([Segment(5, 64), Segment(UNIQUE, 32)]).split() for _ in range(20)]
    assert len({tuple(words[:64]) for words in prompts}) == 1
    assert len({tuple(words[64:]) for words in prompts}) == 20
    others = {tuple(maker.text([Segment(key, 64)]).split()) for key in range(50)}
    assert len(others) == 50
    assert PromptMaker(calibration, 2).text([Segment(5, 64)]).split() != prompts[0][:64]


async def _one_token_per_word(text: str) -> int:
    assert set(text.split()) <= set(WORDS)
    return len(text.split())
