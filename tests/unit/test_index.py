"""The index, the manifest and the names in them: every rule with an input that breaks it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusync.errors import FormatError, IndexFormatError, SourceNotReadyError
from gpusync.format.index import (
    build_manifest,
    parse_index,
    parse_json_object,
    parse_manifest,
    parse_shard_name,
    parse_version_dir_name,
    version_dir_name,
)
from gpusync.types import DeltaIndex, FullIndex, Manifest, ManifestEntry
from tests.unit.strategies import fixed

SHARD = "model-00000-of-00001.safetensors"
METADATA = {
    "version": "000007",
    "base_version": "000006",
    "delta_encoding": "xor",
    "compression_format": "zstd",
    "checksum_format": "xxh3-128",
}


def text(metadata: Any = METADATA, weight_map: Any = None, **more: Any) -> bytes:
    weight_map = {"a": SHARD} if weight_map is None else weight_map
    return json.dumps({"metadata": metadata, "weight_map": weight_map, **more}).encode()


def refused(data: bytes, match: str) -> IndexFormatError:
    with pytest.raises(IndexFormatError, match=match) as caught:
        parse_index(data, file="i.json")
    assert caught.value.file == "i.json"
    return caught.value


# ---- versions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("weight_v000007", 7),
        ("weight_v7", 7),
        ("weight_v0000000007", 7),
        ("weight_v1234567", 1234567),
        ("weight_v000000", None),
        ("weight_v", None),
        ("weight_v-1", None),
        ("weight_v+1", None),
        ("weight_v1_0", None),
        ("weight_v 1", None),
        ("weight_v1\n", None),
        ("weight_v000007.tmp", None),
        (".weight_v000007", None),
        ("weight_v\u0661", None),
        ("weight_v" + "9" * 5000, None),
        ("latest", None),
        ("aggregate", None),
    ],
)
def test_version_folder_name(name: str, version: int | None) -> None:
    assert parse_version_dir_name(name) == version


@pytest.mark.parametrize("version", [1, 7, 999_999, 1_000_000])
def test_version_folder_name_round_trip(version: int) -> None:
    assert parse_version_dir_name(version_dir_name(version)) == version
    assert version_dir_name(7) == "weight_v000007"


# ---- shard names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        SHARD,
        "model.safetensors",
        "m\u00f6del 1.safetensors",
        "x" * 243 + ".safetensors",
    ],
)
def test_shard_name_of_one_plain_component_is_taken(name: str) -> None:
    assert parse_shard_name(name, file="i.json") == name


BAD_SHARD_NAMES = {
    "parent": "../x.safetensors",
    "absolute": "/abs.safetensors",
    "nested": "a/b.safetensors",
    "dot-dot": "..",
    "dot-dot inside": "a..safetensors",
    "dot": ".",
    "empty": "",
    "NUL": "a\0.safetensors",
    "drive": "C:\\x.safetensors",
    "drive relative": "C:x.safetensors",
    "backslash": "a\\b.safetensors",
    "fraction slash": "a\u2044b.safetensors",
    "division slash": "a\u2215b.safetensors",
    "full-width slash": "a\uff0fb.safetensors",
    "full-width backslash": "a\uff3cb.safetensors",
    "small backslash": "a\ufe68b.safetensors",
    "set minus": "a\u2216b.safetensors",
    "reverse solidus operator": "a\u29f5b.safetensors",
    "big solidus": "a\u29f8b.safetensors",
    "full-width dots": "\uff0e\uff0e.safetensors",
    "two-dot leader": "\u2025.safetensors",
    "full-width colon": "C\uff1ax.safetensors",
    "newline": "a\n.safetensors",
    "right-to-left override": "a\u202e.safetensors",
    "zero-width space": "a\u200b.safetensors",
    "too long": "x" * 244 + ".safetensors",
    "too long in UTF-8": "\u00e9" * 122 + ".safetensors",
    "other suffix": "model.bin",
    "suffix in capitals": "model.SAFETENSORS",
    "number": 7,
    "null": None,
    "list": ["a.safetensors"],
}


@pytest.mark.parametrize("case", BAD_SHARD_NAMES)
def test_shard_name_that_is_no_plain_file_name_is_refused(case: str) -> None:
    err = refused(text(weight_map={"good": SHARD, "a": BAD_SHARD_NAMES[case]}), "shard name")
    assert err.tensor == "a"
    with pytest.raises(IndexFormatError):
        parse_shard_name(BAD_SHARD_NAMES[case], file="i.json")


# ---- deltas -----------------------------------------------------------------------------------------


def test_delta_index() -> None:
    assert parse_index(text(), file="i.json") == DeltaIndex(7, 6, "xor", "xxh3-128", {"a": SHARD})


@pytest.mark.parametrize("encoding", ["xor", "overwrite", "xor_sparse", "xor_rows"])
@pytest.mark.parametrize("algorithm", ["xxh3-128", "blake3", "adler32"])
def test_every_known_encoding_and_checksum_is_taken(encoding: str, algorithm: str) -> None:
    data = text({**METADATA, "delta_encoding": encoding, "checksum_format": algorithm})
    index = parse_index(data, file="i.json")
    assert isinstance(index, DeltaIndex)
    assert (index.encoding, index.algorithm) == (encoding, algorithm)


@pytest.mark.parametrize("version", ["000007", "7", 7, "0000000000007"])
def test_version_as_padded_string_or_number(version: object) -> None:
    index = parse_index(text({**METADATA, "version": version}), file="i.json")
    assert index.version == 7


@pytest.mark.parametrize("key", ["version", "base_version"])
@pytest.mark.parametrize(
    "value",
    [-1, "-1", 7.0, "7.0", True, None, "", " 7", "0x7", "1_0", "\u0667", [7], 1e300, 10**18],
)
def test_version_that_is_no_integer_is_refused(key: str, value: object) -> None:
    refused(text({**METADATA, key: value}), f"{key} is not an integer")


def test_version_zero_is_the_base_and_never_published() -> None:
    refused(text({**METADATA, "version": "000000"}), "version is not an integer of at least 1")
    index = parse_index(text({**METADATA, "version": 1, "base_version": 0}), file="i.json")
    assert isinstance(index, DeltaIndex) and index.base_version == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("delta_encoding", "xor2"),
        ("delta_encoding", "XOR"),
        ("delta_encoding", None),
        ("delta_encoding", ["xor"]),
        ("compression_format", "gzip"),
        ("compression_format", ""),
        ("checksum_format", "sha256"),
        ("checksum_format", 128),
    ],
)
def test_unknown_encoding_compression_or_checksum_is_refused(key: str, value: object) -> None:
    refused(text({**METADATA, key: value}), f"{key} is not one")


@pytest.mark.parametrize(
    "key", ["version", "base_version", "compression_format", "checksum_format"]
)
def test_delta_without_a_required_key_is_refused(key: str) -> None:
    refused(text({name: value for name, value in METADATA.items() if name != key}), key)


def test_empty_delta_is_a_version() -> None:
    index = parse_index(text(weight_map={}), file="i.json")
    assert isinstance(index, DeltaIndex) and index.weight_map == {}


def test_unknown_extra_keys_are_ignored() -> None:
    data = text({**METADATA, "producer": "x", "n": 10**400, "f": 1.5}, extra=[{"a": None}])
    assert parse_index(data, file="i.json") == parse_index(text(), file="i.json")


@pytest.mark.parametrize("weight_map", [[], [["a", SHARD]], "x", 1, None])
def test_weight_map_that_is_no_object_is_refused(weight_map: object) -> None:
    data = json.dumps({"metadata": METADATA, "weight_map": weight_map}).encode()
    refused(data, "weight_map is not an object")
    refused(json.dumps({"metadata": METADATA}).encode(), "weight_map is not an object")


@pytest.mark.parametrize("name", ["", "a\0b", "__metadata__", "x" * 4097, "\u00e9" * 2049])
def test_tensor_name_that_is_empty_reserved_nul_or_too_long_is_refused(name: str) -> None:
    refused(text(weight_map={name: SHARD}), "a tensor name")


@pytest.mark.parametrize("name", ["x" * 4096, "\u00e9" * 2048, "\U0001f600", "a b/c:d"])
def test_any_other_tensor_name_is_taken(name: str) -> None:
    assert list(parse_index(text(weight_map={name: SHARD}), file="i.json").weight_map) == [name]


def test_manifest_digest_is_read_and_lowered() -> None:
    data = text({**METADATA, "gpusync_manifest": "AB" * 16})
    assert parse_index(data, file="i.json").manifest_digest == "ab" * 16


@pytest.mark.parametrize("value", ["ab", "g" * 32, None, 5, "0" * 33])
def test_manifest_digest_of_wrong_form_is_refused(value: object) -> None:
    refused(text({**METADATA, "gpusync_manifest": value}), "gpusync_manifest is not 32 hex")


# ---- full versions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "version"),
    [
        ({}, None),
        ({"total_size": 4096}, None),
        ({"version": "000007"}, 7),
        ({"version": 7}, 7),
        ({"version": "1.0"}, None),
    ],
)
def test_index_without_delta_encoding_is_full(metadata: Any, version: int | None) -> None:
    assert parse_index(text(metadata), file="i.json") == FullIndex({"a": SHARD}, version)


def test_index_without_metadata_is_full() -> None:
    data = json.dumps({"weight_map": {"a": SHARD}}).encode()
    assert parse_index(data, file="i.json") == FullIndex({"a": SHARD})


def test_full_index_without_tensors_is_refused() -> None:
    refused(text({}, {}), "weight_map is empty")


@pytest.mark.parametrize("metadata", [None, [], "x", 1])
def test_metadata_that_is_no_object_is_refused(metadata: object) -> None:
    refused(text(metadata), "metadata is not an object")


# ---- the text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"\0", b"\0" * 4096])
def test_index_that_is_empty_or_zeros_is_not_there_yet(data: bytes) -> None:
    for parse in (parse_index, parse_manifest):
        with pytest.raises(SourceNotReadyError) as caught:
            parse(data, file="i.json")
        assert caught.value.file == "i.json"


def test_index_torn_at_any_byte_is_refused() -> None:
    data = text()
    for nbytes in range(1, len(data)):
        refused(data[:nbytes], "not JSON")


BAD_TEXTS = {
    "not JSON": (b"hello", "not JSON"),
    "not UTF-8": (text().replace(b'"a"', b'"\xff\xfe"'), "not UTF-8"),
    "UTF-8 surrogate": (text().replace(b'"a"', b'"\xed\xa0\x80"'), "not UTF-8"),
    "overlong UTF-8": (text().replace(b'"a"', b'"\xc0\xaf"'), "not UTF-8"),
    "UTF-16": (text().decode().encode("utf-16"), "not UTF-8"),
    "byte order mark": (b"\xef\xbb\xbf" + text(), "not JSON"),
    "array": (b"[]", "not a JSON object"),
    "null": (b"null", "not a JSON object"),
    "two objects": (text() + text(), "not JSON"),
    "trailing comma": (b'{"weight_map": {},}', "not JSON"),
    "zeros after the text": (text() + b"\0" * 8, "not JSON"),
    "control character": (b'{"a\n": 1}', "not JSON"),
    "NaN": (b'{"weight_map": {}, "x": NaN}', "NaN"),
    "Infinity": (b'{"weight_map": {}, "x": Infinity}', "Infinity"),
    "-Infinity": (b'{"weight_map": {}, "x": -Infinity}', "Infinity"),
    "duplicate key": (b'{"weight_map": {}, "weight_map": {}}', "'weight_map' twice"),
    "duplicate tensor": (b'{"weight_map": {"a": "x", "b": "x", "a": "y"}}', "'a' twice"),
    "duplicate in escapes": (b'{"weight_map": {"a": "x", "\\u0061": "y"}}', "'a' twice"),
    "lone surrogate": (b'{"weight_map": {"\\ud800": "x"}}', "lone surrogate"),
    "lone low surrogate": (b'{"weight_map": {}, "x": ["\\uDFFF"]}', "lone surrogate"),
    "deep arrays": (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nests too deep"),
    "deep objects": (b'{"x":' * 100_000 + b"1" + b"}" * 100_000, "nests too deep"),
}


@pytest.mark.parametrize("case", BAD_TEXTS)
def test_index_text_that_breaks_a_rule_is_refused(case: str) -> None:
    refused(*BAD_TEXTS[case])


def test_surrogate_pair_and_surrounding_whitespace_are_taken() -> None:
    data = b" \r\n\t" + text(weight_map={"\U0001f600": SHARD}) + b"\n"
    assert b"\\ud83d\\ude00" in data
    assert list(parse_index(data, file="i.json").weight_map) == ["\U0001f600"]


def test_long_integers_take_linear_time() -> None:
    data = b'{"weight_map": {"a": "x.safetensors"}, "n": ' + b"7" * 5_000_000 + b"}"
    # A cost that is not linear would run into the test's timeout.
    parse_index(data, file="i.json")


def test_json_error_class_is_the_callers() -> None:
    with pytest.raises(FormatError, match="the thing is not JSON") as caught:
        parse_json_object(b"{", file="f", error=FormatError, what="the thing")
    assert type(caught.value) is FormatError


def test_index_of_100_000_tensors_parses_within_two_seconds() -> None:
    names = {f"model.layers.{n}.weight": f"m-{n % 97}.safetensors" for n in range(100_000)}
    data = text(weight_map=names)
    # A cost that is not linear would run into the test's timeout.
    assert len(parse_index(data, file="i.json").weight_map) == 100_000


@fixed
@given(st.binary(max_size=80) | st.integers(0, len(text()) - 1), st.integers(0, 255))
def test_any_bytes_give_an_index_or_a_typed_error(data: bytes | int, value: int) -> None:
    if isinstance(data, int):
        data = text()[:data] + bytes([value]) + text()[data + 1 :]
    try:
        index = parse_index(data, file="i.json")
    except (IndexFormatError, SourceNotReadyError):
        return
    assert isinstance(index, (DeltaIndex, FullIndex))


# ---- manifest ---------------------------------------------------------------------------------------

MANIFEST = Manifest(
    version=7,
    run_id="run-1",
    base_fingerprint="cd" * 16,
    tensors={
        "a": ManifestEntry("ab" * 16, 24, "BF16", (3, 4), "seekable"),
        "scalar": ManifestEntry("ab" * 16, 4, "F32", (), "single"),
    },
)


def test_manifest_round_trip() -> None:
    assert parse_manifest(build_manifest(MANIFEST), file="m.json") == MANIFEST
    first = Manifest(1, "r", None, {})
    assert parse_manifest(build_manifest(first), file="m.json") == first


def bend(path: str, value: Any) -> bytes:
    manifest = json.loads(build_manifest(MANIFEST))
    *folders, key = path.split("/")
    target = manifest
    for folder in folders:
        target = target[folder]
    target[key] = value
    return json.dumps(manifest).encode()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", 0),
        ("version", "x"),
        ("run_id", ""),
        ("run_id", 5),
        ("run_id", "a\nb"),
        ("base_fingerprint", "cd"),
        ("base_fingerprint", 5),
        ("tensors", []),
        ("tensors/a", None),
        ("tensors/", {}),
        ("tensors/a/blob_digest", "zz" * 16),
        ("tensors/a/blob_digest", None),
        ("tensors/a/nbytes", 25),
        ("tensors/a/nbytes", 24.0),
        ("tensors/a/nbytes", -24),
        ("tensors/a/nbytes", True),
        ("tensors/a/dtype", "BF17"),
        ("tensors/a/dtype", ["BF16"]),
        ("tensors/a/shape", [3, 5]),
        ("tensors/a/shape", [-3, -4]),
        ("tensors/a/shape", 12),
        ("tensors/a/shape", [True, 12]),
        ("tensors/a/framing", "frames"),
        ("tensors/a/framing", 1),
    ],
)
def test_manifest_that_breaks_a_rule_is_refused(path: str, value: Any) -> None:
    with pytest.raises(IndexFormatError) as caught:
        parse_manifest(bend(path, value), file="m.json")
    assert caught.value.file == "m.json"
    if path.startswith("tensors/a/"):
        assert caught.value.tensor == "a"
