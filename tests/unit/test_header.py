"""The safetensors header: every rule, and safetensors itself as the oracle that ours is never laxer than."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from gpusync.errors import GpuSyncError, HeaderFormatError, SourceNotReadyError
from gpusync.format.header import (
    DTYPE_BITS,
    build_header,
    parse_header,
    parse_header_nbytes,
    tensor_nbytes,
)
from gpusync.types import ShardHeader
from tests.unit.strategies import SIZES, checkpoints, entry, fixed, header

CAP = 100_000_000
ONE = {"a": entry("U8", [4], 0, 4)}


def parse(data: bytes, file_nbytes: int | None = None) -> ShardHeader:
    """Parse a whole file as a reader would: length word first, then the header alone."""
    file_nbytes = len(data) if file_nbytes is None else file_nbytes
    nbytes = parse_header_nbytes(
        data[:8], file_nbytes=file_nbytes, file="f.safetensors", max_bytes=CAP
    )
    return parse_header(data[: 8 + nbytes], file_nbytes=file_nbytes, file="f.safetensors")


def refused(value: Any, data: bytes = b"abcd", match: str | None = None) -> HeaderFormatError:
    with pytest.raises(HeaderFormatError, match=match) as caught:
        parse(header(value) + data)
    assert caught.value.file == "f.safetensors"
    return caught.value


def not_ready(data: bytes, match: str | None) -> None:
    with pytest.raises(SourceNotReadyError, match=match) as caught:
        parse(data)
    assert caught.value.file == "f.safetensors"


# ---- what is taken ----------------------------------------------------------------------------------


def test_header_entries_are_in_order_of_begin_and_raw_is_verbatim() -> None:
    rows = {
        "b": entry("BF16", [2, 2], 4, 12),
        "__metadata__": {"format": "pt"},
        "a": entry("U8", [4], 0, 4),
        "empty": entry("I64", [0, 7], 12, 12),
        "scalar": entry("F32", [], 12, 16),
    }
    parsed = parse(header(rows) + bytes(16))
    assert list(parsed.entries) == ["a", "b", "empty", "scalar"]
    assert parsed.raw == header(rows)
    assert parsed.data_offset == len(header(rows))
    assert parsed.metadata == {"format": "pt"}
    assert parsed.entries["b"].shape == (2, 2)
    assert parsed.entries["b"].nbytes == 8


@pytest.mark.parametrize("nbytes", SIZES)
def test_sizes_and_any_byte_alignment(nbytes: int) -> None:
    rows = {"a": entry("U8", [nbytes], 0, nbytes), "b": entry("F32", [], nbytes, nbytes + 4)}
    parsed = parse(header(rows) + bytes(nbytes + 4))
    assert parsed.entries["b"].begin == nbytes


def test_leading_whitespace_and_padding_are_taken() -> None:
    text = json.dumps(ONE).encode()
    for padded in (b" \n\t" + text, text + b" " * 41, text + b"\n"):
        assert parse(header(padded) + bytes(4)).entries.keys() == {"a"}
        assert safetensors.deserialize(header(padded) + bytes(4))


def test_file_without_tensors() -> None:
    assert parse(header({})).entries == {}
    assert parse(header({"__metadata__": {}})).metadata == {}


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_of_safetensors_is_known_with_its_size(dtype: str) -> None:
    data = header({"a": entry(dtype, [8], 0, DTYPE_BITS[dtype])}) + bytes(DTYPE_BITS[dtype])
    assert parse(data).entries["a"].dtype == dtype
    assert safetensors.deserialize(data)[0][1]["dtype"] == dtype


def test_tensor_over_4_gib_is_taken_without_its_bytes() -> None:
    nbytes = (1 << 32) + 6
    raw = header({"a": entry("BF16", [nbytes // 2], 0, nbytes)})
    assert parse(raw, len(raw) + nbytes).entries["a"].nbytes == nbytes


# ---- the length word --------------------------------------------------------------------------------

FILE = header({"__metadata__": {"a": "0" * 32}, **ONE}) + b"abcd"


@pytest.mark.parametrize(
    ("nbytes", "match"),
    [
        (0, "within the header's length word"),
        (4, "within the header's length word"),
        (7, "within the header's length word"),
        (8, "within its header"),
        (20, "within its header"),
        (len(FILE) - 5, "within its header"),
        (len(FILE) - 4, "shorter than its header demands"),
        (len(FILE) - 2, "shorter than its header demands"),
        (len(FILE) - 1, "shorter than its header demands"),
    ],
)
def test_file_cut_anywhere_is_not_there_yet(nbytes: int, match: str) -> None:
    not_ready(FILE[:nbytes], match)


def test_file_cut_at_every_byte_is_not_there_yet() -> None:
    for nbytes in range(len(FILE)):
        not_ready(FILE[:nbytes], None)


@pytest.mark.parametrize("trailing", [b"\0", b"x", b"\0" * 4096])
def test_bytes_after_the_last_tensor_are_refused(trailing: bytes) -> None:
    with pytest.raises(HeaderFormatError, match="bytes after the last tensor") as caught:
        parse(FILE + trailing)
    assert (caught.value.expected, caught.value.got) == (4, 4 + len(trailing))


@pytest.mark.parametrize("nbytes", [CAP + 1, 1 << 32, 1 << 63, (1 << 64) - 1])
def test_header_length_over_the_cap_is_refused_before_it_is_allocated(nbytes: int) -> None:
    tracemalloc.start()
    with pytest.raises(HeaderFormatError, match="over the cap") as caught:
        parse(struct.pack("<Q", nbytes) + bytes(100))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.got == nbytes
    assert peak < 100_000


def test_header_length_over_the_file_is_not_there_yet() -> None:
    not_ready(struct.pack("<Q", 93) + bytes(92), "within its header")


@pytest.mark.parametrize("nbytes", [8, 100, 4096])
def test_header_of_zeros_is_not_there_yet(nbytes: int) -> None:
    not_ready(bytes(nbytes), "zeros where a header should be")
    not_ready(struct.pack("<Q", 64) + bytes(nbytes + 64), "zeros where a header should be")


def test_raw_that_is_not_the_header_alone_is_refused() -> None:
    for raw in (FILE, header(ONE) + b"a"):
        with pytest.raises(HeaderFormatError, match="not the header's"):
            parse_header(raw, file_nbytes=len(raw), file="f")


# ---- the text ---------------------------------------------------------------------------------------

TEXT = json.dumps(ONE).encode()

BAD_TEXTS = {
    "not JSON": b"hello world.....",
    "not UTF-8": TEXT.replace(b'"dtype"', b'"dt\xff\xfe"'),
    "UTF-8 surrogate": TEXT.replace(b'"a"', b'"\xed\xa0\x80"'),
    "lone surrogate": TEXT.replace(b'"a"', b'"\\ud800"'),
    "lone surrogate in metadata": b'{"__metadata__": {"x": "\\udc00"}, ' + TEXT[1:],
    "NUL in a name": TEXT.replace(b'"a"', b'"a\\u0000"'),
    "very long name": TEXT.replace(b'"a"', b'"' + b"a" * 4097 + b'"'),
    "empty name": TEXT.replace(b'"a"', b'""'),
    "array": b"[" + TEXT + b"]",
    "duplicate tensor": b"{" + TEXT[1:-1] + b"," + TEXT[1:],
    "duplicate dtype": TEXT.replace(b'"dtype"', b'"dtype": "U8", "dtype"'),
    "duplicate metadata": b'{"__metadata__": {}, "__metadata__": {}, ' + TEXT[1:],
    "duplicate in metadata": b'{"__metadata__": {"x": "1", "x": "2"}, ' + TEXT[1:],
    "NaN offset": TEXT.replace(b"[0, 4]", b"[NaN, 4]"),
    "Infinity offset": TEXT.replace(b"[0, 4]", b"[0, Infinity]"),
    "negative zero offset": TEXT.replace(b"[0, 4]", b"[-0, 4]"),
    "deep nesting": b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "text after the object": TEXT + b"x",
    "zeros after the object": TEXT + b"\0",
    "text cut": TEXT[:-1],
}


@pytest.mark.parametrize("case", BAD_TEXTS)
def test_header_text_that_breaks_a_rule_is_refused(case: str) -> None:
    refused(BAD_TEXTS[case])


# ---- metadata ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("metadata", [None, [], "x", 7, [["a", "b"]]])
def test_metadata_that_is_no_object_is_refused(metadata: object) -> None:
    refused({"__metadata__": metadata, **ONE}, match="__metadata__ is not an object")


@pytest.mark.parametrize("value", [None, 7, 1.5, True, [], {}])
def test_metadata_value_that_is_no_string_is_refused(value: object) -> None:
    err = refused({"__metadata__": {"a": "x", "b": value}, **ONE}, match="is not a string")
    assert err.tensor == "'b'"  # as errors show foreign names


def test_tensor_named_metadata_is_refused() -> None:
    refused({"__metadata__": entry("U8", [4], 0, 4)}, match="is not a string")


# ---- entries ----------------------------------------------------------------------------------------

BAD_ENTRIES = {
    "null": None,
    "array": ["U8", [4], [0, 4]],
    "string": "U8",
    "no dtype": {"shape": [4], "data_offsets": [0, 4]},
    "no shape": {"dtype": "U8", "data_offsets": [0, 4]},
    "no offsets": {"dtype": "U8", "shape": [4]},
    "unknown key": {**ONE["a"], "strides": [2]},
    "unknown dtype": entry("U7", [4], 0, 4),
    "dtype in lower case": entry("u8", [4], 0, 4),
    "dtype number": entry(8, [4], 0, 4),
    "dtype list": entry(["U8"], [4], 0, 4),
    "offsets null": {"dtype": "U8", "shape": [4], "data_offsets": None},
    "offsets string": {"dtype": "U8", "shape": [4], "data_offsets": "04"},
    "one offset": {"dtype": "U8", "shape": [4], "data_offsets": [4]},
    "three offsets": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 4]},
    "begin over end": entry("U8", [4], 4, 0),
    "negative offset": entry("U8", [4], -1, 3),
    "float offset": entry("U8", [4], 0.0, 4),
    "huge float offset": entry("U8", [4], 0, 1e308),
    "boolean offset": entry("U8", [1], False, True),
    "string offset": entry("U8", [4], "0", 4),
    "offset over u64": entry("U8", [1 << 64], 0, 1 << 64),
    "offset of 400 digits": entry("U8", [4], 0, 10**399),
    "shape null": entry("U8", None, 0, 4),
    "shape number": entry("U8", 4, 0, 4),
    "shape string": entry("U8", "4", 0, 4),
    "negative dimension": entry("U8", [-4], 0, 4),
    "two negative dimensions": entry("U8", [-2, -2], 0, 4),
    "float dimension": entry("U8", [4.0], 0, 4),
    "boolean dimension": entry("U8", [True, 4], 0, 4),
    "nested shape": entry("U8", [[4]], 0, 4),
    "product over u64": entry("U8", [1 << 32, 1 << 32], 0, 0),
    "product over u64, wraps to 4": entry("U8", [1 << 63, 2, 4], 0, 4),
    "product over u64 before a zero": entry("U8", [1 << 63, 4, 0], 0, 0),
    "bits over u64": entry("C64", [1 << 58, 1], 0, 1 << 61),
    "dimension over u64 beside a zero": entry("U8", [0, 1 << 64], 0, 0),
    "F4 that fills no byte": entry("F4", [3], 0, 2),
    "F6 that fills no byte": entry("F6_E2M3", [5], 0, 4),
    "shape one longer than the range": entry("U8", [5], 0, 4),
    "shape one shorter than the range": entry("U8", [3], 0, 4),
    "scalar over an empty range": entry("F32", [], 0, 0),
}


@pytest.mark.parametrize("case", BAD_ENTRIES)
def test_tensor_entry_that_breaks_a_rule_is_refused(case: str) -> None:
    assert refused({"a": BAD_ENTRIES[case]}).tensor == "a"


BAD_EXTENTS = {
    "first not at 0": ({"a": entry("U8", [3], 1, 4)}, "hole"),
    "hole": ({"a": entry("U8", [1], 0, 1), "b": entry("U8", [2], 2, 4)}, "hole"),
    "overlap": ({"a": entry("U8", [3], 0, 3), "b": entry("U8", [2], 2, 4)}, "overlaps"),
    "same range twice": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}, "overlaps"),
    "one within another": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [1], 1, 2)}, "overlaps"),
    "empty tensor within another": (
        {"a": entry("U8", [4], 0, 4), "b": entry("U8", [0], 2, 2)},
        "overlaps",
    ),
    "empty tensor after the end": (
        {"a": entry("U8", [4], 0, 4), "b": entry("U8", [0], 5, 5)},
        "hole",
    ),
}


@pytest.mark.parametrize("case", BAD_EXTENTS)
def test_entries_that_overlap_or_leave_a_hole_are_refused(case: str) -> None:
    rows, match = BAD_EXTENTS[case]
    refused(rows, match=match)
    refused(dict(reversed(rows.items())), match=match)


def test_range_past_the_end_of_the_file_is_not_there_yet() -> None:
    not_ready(header({"a": entry("U8", [5], 0, 5)}) + b"abcd", "shorter than its header demands")
    not_ready(header({"a": entry("U8", [1 << 60], 0, 1 << 60)}) + b"abcd", "shorter")


def test_what_only_ours_refuses_is_refused_on_purpose() -> None:
    """Of all bad inputs above, safetensors takes these at most: each is a rule of ours that it lacks."""
    bad = {**BAD_TEXTS, **{case: {"a": row} for case, row in BAD_ENTRIES.items()}}
    taken = {case for case, value in bad.items() if oracle(header(value) + b"abcd") is not None}
    assert taken <= {
        "NUL in a name",
        "very long name",
        "empty name",
        "array",  # its parser takes a list for an object
        "duplicate tensor",
        "duplicate in metadata",
        "unknown key",
    }


# ---- oracle -----------------------------------------------------------------------------------------


def oracle(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """What safetensors makes of a file: tensors, or None where it refuses."""
    try:
        rows = safetensors.deserialize(data)
    except (safetensors.SafetensorError, UnicodeEncodeError):
        return None
    return {name: (row["dtype"], tuple(row["shape"]), bytes(row["data"])) for name, row in rows}


def ours(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    try:
        parsed = parse(data)
    except (HeaderFormatError, SourceNotReadyError):
        return None
    start = parsed.data_offset
    return {
        row.name: (row.dtype, row.shape, data[start + row.begin : start + row.end])
        for row in parsed.entries.values()
    }


@fixed
@given(checkpoints())
def test_valid_files_read_as_safetensors_reads_them(file: tuple[dict[str, Any], bytes]) -> None:
    rows, data = file
    whole = header(rows) + data
    assert ours(whole) == oracle(whole)
    assert ours(whole) is not None


@fixed
@given(
    checkpoints(),
    st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_damaged_files_are_never_read_laxer_than_safetensors(
    file: tuple[dict[str, Any], bytes], flips: list[tuple[int, int]]
) -> None:
    whole = bytearray(header(file[0]) + file[1])
    for position, value in flips:
        whole[position % len(whole)] = value
    mine = ours(bytes(whole))
    assert mine is None or mine == oracle(bytes(whole))


NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 4, 8, 1 << 63, (1 << 64) - 1, 1 << 64, 1.0, 1e308, "1"])


@fixed
@given(
    checkpoints(),
    st.lists(NUMBERS, max_size=3),
    st.lists(NUMBERS, min_size=2, max_size=2),
    st.sampled_from(["U8", "BF16", "F4", "F6_E3M2", "C64", "X1"]),
)
def test_bent_entries_are_never_read_laxer_than_safetensors(
    file: tuple[dict[str, Any], bytes], shape: list[Any], offsets: list[Any], dtype: str
) -> None:
    rows = {**file[0], "bent": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}
    whole = header(rows) + file[1]
    mine = ours(whole)
    assert mine is None or mine == oracle(whole)


@fixed
@given(st.binary(max_size=200))
def test_any_bytes_give_a_header_or_a_typed_error(data: bytes) -> None:
    for whole in (data, header(data)):
        mine = ours(whole)
        assert mine is None or mine == oracle(whole)


# ---- building, size ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_built_header_is_padded_and_reads_back_in_both(count: int, tmp_path: Path) -> None:
    tensors = [(f"t\u00e9{n}", "BF16", (n, 3), n * 6) for n in range(count)]
    raw = build_header(tensors, {"format": "pt"})
    assert len(raw) % 8 == 0
    data = bytes(sum(nbytes for *_, nbytes in tensors))
    parsed = parse(raw + data)
    assert [(e.name, e.dtype, e.shape, e.nbytes) for e in parsed.entries.values()] == tensors
    path = tmp_path / "f.safetensors"
    path.write_bytes(raw + data)
    with safetensors.safe_open(path, "numpy") as file:
        assert sorted(file.keys()) == sorted(parsed.entries)
        assert file.metadata() == {"format": "pt"}
    assert parse(build_header(tensors, None) + data).metadata == {}


def test_tensor_nbytes_of_what_is_no_tensor_is_none() -> None:
    assert tensor_nbytes("BF16", (3, 4)) == 24
    assert tensor_nbytes("F4", [6]) == 3
    assert tensor_nbytes("F32", []) == 4
    for dtype, shape in (("X", [1]), (None, [1]), ("U8", None), ("U8", [None]), ("F4", [1])):
        assert tensor_nbytes(dtype, shape) is None


def test_header_of_100_000_tensors_parses() -> None:
    tensors = [(f"model.layers.{n}.mlp.weight", "BF16", (128, 64), 16384) for n in range(100_000)]
    raw = build_header(tensors, {name: "0" * 32 for name, *_ in tensors})
    # A cost that is not linear would run into the test's timeout.
    parsed = parse(raw, len(raw) + 16384 * len(tensors))
    assert len(parsed.entries) == 100_000


def test_header_full_of_duplicates_is_refused_in_linear_time() -> None:
    text = b"{" + b",".join(b'"t%d":0' % (n % 150_000) for n in range(300_000)) + b"}"
    # A cost that is not linear would run into the test's timeout.
    refused(text, match="twice")


def test_errors_survive_pickling_with_their_values() -> None:
    import pickle

    err = refused({"a": entry("U8", [5], 0, 4)})
    copy: GpuSyncError = pickle.loads(pickle.dumps(err))
    assert (type(copy), str(copy)) == (HeaderFormatError, str(err))
    assert (copy.tensor, copy.expected, copy.got) == ("a", 5, 4)
