"""Ids of images: they tell contents apart, and a few equal ones prove nothing."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from lightserve.errors import ProtocolError
from lightserve.messages.common import Int32Array, TokenSegment, pack_int32
from lightserve.messages.frontend_router import Submit
from lightserve.messages.images import (
    HEAD_TOKENS,
    IMAGE_ID,
    Image,
    check_images,
    digest_of,
    text_tokens,
    whole_images,
    with_image_ids,
    without_image_ids,
)
from lightserve.models.plain_config import Activation
from lightserve.models.vision_config import ImageProcessor, VisionConfig
from lightserve.router.from_submit import check_submit
from lightserve.router.kv.block_events import BlockEvents, BlockStored
from lightserve.router.kv.prefix_node import task_aware
from lightserve.router.kv.prefix_tree import PrefixTree
from lightserve.types import RequestClass, RequestId, SamplingParams


def image(start: int, colour: int = 0, num_tokens: int = 9) -> Image:
    pixels = bytes([colour]) * 12
    return Image(start, num_tokens, 2, 2, pixels, digest_of(2, 2, pixels))


def prompt(*images: Image, length: int = 40) -> Int32Array:
    return with_image_ids(np.arange(100, 100 + length, dtype=np.int32), images)


def test_ids_are_of_content_alone() -> None:
    first, again = prompt(image(3)), prompt(image(5))
    assert (first[3:12] == again[5:14]).all() and (first[3:12] >= IMAGE_ID).all()
    assert (prompt(image(3, 1))[3:12] != first[3:12]).all()
    assert (np.delete(first, np.s_[3:12]) == np.delete(prompt(), np.s_[3:12])).all()
    assert len(set(first[3:12].tolist())) == 9
    assert digest_of(1, 4, bytes(12)) != digest_of(2, 2, bytes(12))
    assert (without_image_ids(first, 7)[3:12] == 7).all()
    assert without_image_ids(prompt(), 7).tolist() == prompt().tolist()
    assert text_tokens(first) == 3 and text_tokens(prompt()) == 40


def test_a_head_is_whole_or_not_there() -> None:
    ids = prompt(image(3), image(12))
    for start in (3, 12):
        for place in range(1, HEAD_TOKENS):
            assert whole_images(ids, start + place) == start
        for length in (start, start + HEAD_TOKENS, start + HEAD_TOKENS + 2):
            assert whole_images(ids, length) == length
    assert whole_images(ids, 0) == 0
    assert whole_images(ids[6:], 1) == 0  # the head began before these


def collide(ids: Int32Array, other: Int32Array, start: int, count: int) -> Int32Array:
    """Return the other's ids, but for the first of an image, which are equal by chance."""
    made = other.copy()
    made[start : start + count] = ids[start : start + count]
    return made


@pytest.mark.parametrize("count", [1, 2, HEAD_TOKENS - 1])
@pytest.mark.parametrize("start", [0, 6])
def test_two_pictures_whose_first_ids_are_equal_share_nothing(start: int, count: int) -> None:
    ids = prompt(image(start))
    other = collide(ids, prompt(image(start, 1)), start, count)
    tree = PrefixTree(task_aware)
    lease, found = tree.acquire("", ids[:0], is_real_time=True)
    assert not len(found)
    assert not len(tree.extend(lease, ids, np.arange(40, dtype=np.int32)))
    assert tree.look_up("", ids).num_tokens == 40
    assert tree.look_up("", other).num_tokens == start
    expected = tree.expect("", other)  # a waiting prompt, of which as much is known
    mine, found = tree.acquire("", other[:start], is_real_time=True)
    assert found.tolist() == list(range(start))
    own = np.arange(100, 140 - start, dtype=np.int32)
    left = tree.extend(mine, other[start:], own)
    assert left.tolist() == own.tolist() and mine.num_tokens == start  # it stays its own
    assert tree.look_up("", other).num_tokens == start
    assert tree.look_up("", ids).num_tokens == 40
    tree.forget(expected)
    for each in (lease, mine):
        tree.release(each)
    assert len(tree.evict(40)) == 40 and not list(tree.nodes())


def test_a_part_that_eviction_left_is_not_taken_for_the_whole() -> None:
    ids = prompt(image(6))
    tree = PrefixTree(task_aware)
    lease, _ = tree.acquire("", ids[:0], is_real_time=True)
    tree.extend(lease, ids, np.arange(40, dtype=np.int32))
    tree.release(lease)
    assert len(tree.evict(31)) == 31  # up to within the head
    assert tree.look_up("", ids).num_tokens == 6
    again, found = tree.acquire("", ids[:6], is_real_time=True)
    left = tree.extend(again, ids[6:], np.arange(50, 84, dtype=np.int32))
    assert len(found) == 6 and len(left) == 34
    tree.release(again)
    assert len(tree.evict(9)) == 9 and not list(tree.nodes())


def test_gateways_hear_of_text_alone() -> None:
    events = BlockEvents(4)
    tree = PrefixTree(task_aware, events=events)
    ids = prompt(image(10))
    lease, _ = tree.acquire("", ids[:0], is_real_time=True)
    tree.extend(lease, ids, np.arange(40, dtype=np.int32))
    (stored,) = events.take()
    assert isinstance(stored, BlockStored) and stored.token_ids == ids[:8].tolist()
    tree.release(lease)
    tree.evict(40)
    (removed,) = events.take()
    assert removed.block_hashes == stored.block_hashes  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "changes",
    [
        {"start": -1},
        {"start": 35},
        {"num_tokens": 4},
        {"height": 0, "pixels": b""},
        {"pixels": bytes(11)},
        {"digest": b""},
    ],
)
def test_images_that_are_none(changes: dict[str, object]) -> None:
    check_images([image(0), image(9)], 40)
    with pytest.raises(ProtocolError):
        check_images([msgspec.structs.replace(image(3), **changes)], 40)
    with pytest.raises(ProtocolError):
        check_images([image(0), image(8)], 40)
    with pytest.raises(ProtocolError, match="more than 64"):
        check_images([image(9 * n) for n in range(65)], 1000)


def test_routers_refuse_images_that_the_model_does_not_read() -> None:
    vision = VisionConfig(
        placeholder=7,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_used_layers=1,
        num_heads=1,
        image_size=6,
        patch_size=2,
        norm_eps=1e-5,
        activation=Activation.GELU,
        drops_class=True,
        projector_activation=Activation.GELU,
        has_projector_bias=True,
        processor=ImageProcessor(None, 6, (0, 0), 3, (6, 6), 1.0, (0.0,) * 3, (1.0,) * 3),
    )
    pixels = bytes(3 * 36)
    read = Image(2, 9, 6, 6, pixels, digest_of(6, 6, pixels))
    submit = Submit(
        request_id=RequestId(1),
        prompt=[TokenSegment(token_ids=pack_int32([7] * 20))],
        max_tokens=1,
        eos_token_ids=[],
        sampling=SamplingParams(),
        request_class=RequestClass.RT,
        age_s=0.0,
        images=(read,),
    )
    check_submit(submit, 50, vision)
    with pytest.raises(ProtocolError, match="does not read"):
        check_submit(submit, 50)
    other = msgspec.structs.replace(submit, images=(image(2),))
    with pytest.raises(ProtocolError, match="does not read"):
        check_submit(other, 50, vision)
    ids = with_image_ids(np.full(20, 7, dtype=np.int32), [read])
    content = [TokenSegment(token_ids=pack_int32(ids))]
    with pytest.raises(ProtocolError, match="prompt beyond the vocabulary"):
        check_submit(msgspec.structs.replace(submit, prompt=content), 50, vision)
