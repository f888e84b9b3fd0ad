import json
import random
import zlib

import pytest

from rlvlm.labels.segments import DamagedLine, decode_line, encode_line


def test_a_line_worked_by_hand():
    assert encode_line({"a": 1}) == b'%08x {"a":1}\n' % zlib.crc32(b'{"a":1}') == b'561bacaf {"a":1}\n'
    assert decode_line(b'561bacaf {"a":1}') == {"a": 1}


def test_no_flipped_or_missing_byte_goes_unseen():
    line = encode_line({"text": "left \n or ü", "p": 0.1})
    rng = random.Random(0)
    for place in range(len(line) - 1):
        flipped = bytearray(line)
        flipped[place] ^= 1 << rng.randrange(8)
        for harmed in (bytes(flipped), line[:place], line[:place] + line[place + 1 :]):
            with pytest.raises(DamagedLine):
                decode_line(harmed)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"3",
        b"{",
        b'"x"',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"\xff\xfe",
        b"9" * 5_000,
    ],
)
def test_a_right_checksum_over_nonsense_is_not_believed(body):
    with pytest.raises(DamagedLine):
        decode_line(b"%08x %s\n" % (zlib.crc32(body), body))


def test_a_number_that_json_has_not_is_refused_when_written():
    with pytest.raises(ValueError):
        encode_line({"p": float("nan")})
    assert json.loads(encode_line({"p": None})[9:]) == {"p": None}
