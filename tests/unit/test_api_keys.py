"""The file of API keys."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from lightserve.errors import ConfigError
from lightserve.http_access import (
    ApiKey,
    Quota,
    digest_of,
    find_key,
    read_api_keys,
)

KEY = "k" * 16
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()


def test_every_form_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# comment\n\n  alice {KEY}\nbob\tsha256:{DIGEST.upper()[:-1]}0 admin \r\n")
    alice, bob = read_api_keys(file)
    assert not alice.is_gateway and alice.quota == Quota()
    assert alice == ApiKey("alice", bytes.fromhex(DIGEST), is_admin=False)
    assert bob == ApiKey("bob", bytes.fromhex(DIGEST[:-1] + "0"), is_admin=True)


def test_what_a_key_may_and_how_much(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"gate {KEY} tpm=5 gateway rpm=1000000000 admin batch_lines=7\n")
    (gate,) = read_api_keys(file)
    assert gate.is_admin and gate.is_gateway
    assert gate.quota == Quota(rpm=1_000_000_000, tpm=5, batch_lines=7)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"", "must have 1 to 1024 keys, got 0"),
        (b"# nothing", "got 0"),
        (b"alice", "line 1: must be NAME KEY"),
        (f"alice {KEY} root".encode(), "line 1: must be NAME KEY"),
        (f"alice {KEY} admin x".encode(), "line 1: must be NAME KEY"),
        (f"alice {KEY} {KEY}".encode(), "line 1: must be NAME KEY"),
        (f"alice {KEY} rpm".encode(), "line 1: must be NAME KEY"),
        (f"alice {KEY} rps=1".encode(), "line 1: must be NAME KEY"),
        (f"alice {KEY} rpm=0".encode(), "rpm must be 1 to 1000000000, got 0"),
        (f"alice {KEY} tpm=-5".encode(), "tpm must be 1 to 1000000000, got -5"),
        (f"alice {KEY} batch_lines=1000000001".encode(), "batch_lines must be 1 to"),
        (f"alice {KEY} rpm=1 rpm=2".encode(), "line 1: gives a word twice"),
        (f"alice {KEY} gateway gateway".encode(), "line 1: gives a word twice"),
        (f"\nal/ice {KEY}".encode(), "line 2: the name must be"),
        (f"{'n' * 65} {KEY}".encode(), "line 1: the name must be"),
        (b"alice " + b"k" * 15, "a key is 16 to 512"),
        (b"alice " + b"k" * 513, "a key is 16 to 512"),
        ("alice ключключключключ".encode(), "a key is 16 to 512"),
        (b"alice sha256:12", "64 hexadecimal digits"),
        (f"alice sha256:{DIGEST}0".encode(), "64 hexadecimal digits"),
        (f"alice {KEY}\nbob {KEY}".encode(), "the same key twice"),
        (f"alice {KEY}\nbob sha256:{DIGEST}".encode(), "the same key twice"),
        (f"eve sha256:{hashlib.sha256(b'').hexdigest()} admin".encode(), "of an empty key"),
        (b"".join(b"u%d %016d\n" % (n, n) for n in range(1025)), "got 1025"),
    ],
)
def test_what_is_wrong_is_told_without_the_key(tmp_path: Path, text: bytes, complaint: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(text)
    with pytest.raises(ConfigError) as raised:
        read_api_keys(file)
    assert complaint in str(raised.value)
    assert KEY[:15] not in str(raised.value)


def test_only_the_key_itself_is_found() -> None:
    keys = [ApiKey("a", digest_of(b"one" * 6)), ApiKey("b", digest_of(b"two" * 6))]
    assert find_key(keys, b"two" * 6) == keys[1]
    for wrong in (b"", b"two", b"two" * 6 + b"x", keys[0].digest, keys[0].digest.hex().encode()):
        assert find_key(keys, wrong) is None


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time must not tell which key it was."""
    compared: list[bytes] = []

    def compare(ours: bytes, given: bytes) -> bool:
        compared.append(ours)
        return ours == given

    monkeypatch.setattr("lightserve.http_access.hmac.compare_digest", compare)
    keys = [ApiKey(str(n), digest_of(b"%d" % n)) for n in range(5)]
    for given in (b"0", b"4", b"none"):
        compared.clear()
        find_key(keys, given)
        assert compared == [key.digest for key in keys]
