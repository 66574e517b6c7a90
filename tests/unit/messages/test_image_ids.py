"""Ids of images: they tell contents apart, however few tokens an image has."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from lightserve.errors import ProtocolError
from lightserve.messages.common import Int32Array, TokenSegment, pack_int32
from lightserve.messages.frontend_router import Submit
from lightserve.messages.images import (
    IMAGE_ID,
    Image,
    ImageNumbers,
    KeptImages,
    check_images,
    digest_of,
    salted,
    text_tokens,
    with_image_ids,
    without_image_ids,
)
from lightserve.models.image_processor import ImageProcessor
from lightserve.models.vision_config import EncoderLayers, PairProjector, VisionConfig
from lightserve.router.from_submit import check_submit
from lightserve.router.kv.block_events import BlockEvents, BlockStored
from lightserve.router.kv.prefix_node import task_aware
from lightserve.router.kv.prefix_tree import PrefixTree
from lightserve.types import Activation, RequestClass, RequestId, SamplingParams


def image(start: int, colour: int = 0, num_tokens: int = 9) -> Image:
    pixels = bytes([colour]) * 12
    return Image(start, num_tokens, 2, 2, pixels, digest_of(2, 2, pixels))


NUMBERS = ImageNumbers()


def prompt(*images: Image, length: int = 40) -> Int32Array:
    text = np.arange(100, 100 + length, dtype=np.int32)
    for own in images:
        text[own.start : own.end] = 7
    return with_image_ids(text, images, NUMBERS.of(images))


def test_ids_are_of_content_alone() -> None:
    first, again = prompt(image(3)), prompt(image(5))
    assert (first[3:12] == again[5:14]).all() and (first[3:12] >= IMAGE_ID).all()
    assert (prompt(image(3, 1))[3:12] != first[3:12]).all()
    assert (np.delete(first, np.s_[3:12]) == np.delete(prompt(), np.s_[3:12])).all()
    assert digest_of(1, 4, bytes(12)) != digest_of(2, 2, bytes(12))
    assert (without_image_ids(first, 7)[3:12] == 7).all()
    assert without_image_ids(prompt(), 7).tolist() == prompt().tolist()
    assert text_tokens(first) == 3 and text_tokens(prompt()) == 40


def test_breaks_of_rows_keep_their_ids() -> None:
    text = np.array([5, 7, 7, 8, 7, 7, 9], dtype=np.int32)
    whole = image(1, num_tokens=5)
    ids = with_image_ids(text, [whole], NUMBERS.of([whole]))
    assert (ids >= IMAGE_ID).tolist() == [False, True, True, False, True, True, False]
    assert without_image_ids(ids, 7).tolist() == text.tolist()


def test_clients_that_share_no_prefixes_share_no_encodings() -> None:
    """Times would tell one that the other has sent the same picture."""
    kept: KeptImages[int] = KeptImages()
    (own,), (others,) = salted([image(0)], "a"), salted([image(0)], "b")
    kept.put(own, 1)
    assert kept.get(others) is None and kept.get(salted([image(0)], "a")[0]) == 1
    numbers = ImageNumbers()
    assert numbers.of([own, others, own]) == [0, 1, 0]


def test_numbers_are_given_once() -> None:
    numbers = ImageNumbers(max_known=3)
    known = [image(0, colour) for colour in range(5)]
    assert numbers.of(known[:3]) == [0, 1, 2] and numbers.of([known[0], known[0]]) == [0, 0]
    assert numbers.of([known[3]]) == [3]  # the second is forgotten: it was named last of all
    assert numbers.of([known[0], known[2], known[3]]) == [0, 2, 3]
    assert numbers.of([known[1], known[0], known[4]]) == [4, 5, 6]  # not 1 again
    assert len(numbers._numbers) == 3


def test_numbers_are_those_of_whole_digests() -> None:
    """Two pictures whose digests begin or end alike share nothing, however short they are."""
    base = image(6, num_tokens=1)
    others = [base.digest[:-1] + b"x", b"x" + base.digest[1:], base.digest[:16] + bytes(16)]
    tree = PrefixTree(task_aware)
    ids = prompt(base)
    lease, found = tree.acquire("", ids[:0], is_real_time=True)
    assert not len(found)
    assert not len(tree.extend(lease, ids, np.arange(40, dtype=np.int32)))
    assert tree.look_up("", ids).num_tokens == 40
    for digest in others:
        other = prompt(msgspec.structs.replace(base, digest=digest))
        assert (np.flatnonzero(other != ids) == [6]).all()
        assert tree.look_up("", other).num_tokens == 6


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
        {"num_tokens": 0},
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
        processor=ImageProcessor(None, 6, (0, 0), 3, (6, 6), 1.0, (0.0,) * 3, (1.0,) * 3),
        names=(),
        prefixes=(),
        hidden_size=8,
        layers=EncoderLayers(
            count=1, num_heads=1, intermediate_size=8, norm_eps=1e-5, activation=Activation.GELU
        ),
        projector=PairProjector(activation=Activation.GELU, has_bias=True),
        patch_size=2,
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
    ids = with_image_ids(np.full(20, 7, dtype=np.int32), [read], [0])
    content = [TokenSegment(token_ids=pack_int32(ids))]
    with pytest.raises(ProtocolError, match="prompt beyond the vocabulary"):
        check_submit(msgspec.structs.replace(submit, prompt=content), 50, vision)
