"""Hypothesis strategies for pictures from hostile clients: truncated, corrupt, with a false size, of other formats."""

from __future__ import annotations

import io
import struct
import zlib
from functools import cache

import numpy as np
from hypothesis import strategies as st
from pictures import alpha_mask, photo, white_mask
from PIL import Image, PngImagePlugin

FORMATS = ("png", "jpeg", "webp", "gif", "bmp", "tiff", "ico", "ppm", "tga", "pdf")


@cache
def picture(file_format: str, mode: str = "RGB", side: int = 48) -> bytes:
    file = io.BytesIO()
    image = Image.fromarray(photo(side, side)).convert(mode)
    image.save(file, file_format)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(*chunks: bytes, width: int = 16, height: int = 16, color_type: int = 2, pixels: bytes | None = None) -> bytes:
    """A PNG of zeros with the given chunks before its pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, color_type, 0, 0, 0))
    rows = zlib.compress(bytes((1 + 3 * 16) * 16)) if pixels is None else pixels
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@cache
def zeros(num_megabytes: int) -> bytes:
    """Zeros, compressed a thousandfold."""
    return zlib.compress(bytes(num_megabytes * 1024 * 1024), 9)


BOMBS = (
    *("iCCP", "zTXt", "many zTXt", "iTXt", "IDAT longer than its picture", "100000 x 100000", "2^31 x 2^31", "0 x 0"),
    *("900 megapixels of one bit", "JPEG of 20000 scans", "WebP of 16383 x 16383"),
)


@cache
def bombs() -> dict[str, bytes]:
    """BOMBS: small files that expand to a large size: in pixels, metadata or scans."""
    text = PngImagePlugin.PngInfo()
    for number in range(75):
        text.add_itxt(f"k{number}", "a" * 900_000, zip=True)
    itxt = io.BytesIO()
    Image.new("RGB", (16, 16)).save(itxt, "PNG", pnginfo=text)
    grey = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(grey, "PNG")
    scans = io.BytesIO()
    Image.fromarray(photo(64, 64)).save(scans, "JPEG", progressive=True)
    jpeg = scans.getvalue()
    last_scan = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    return {
        "iCCP": png(chunk(b"iCCP", b"p\0\0" + zeros(200))),
        "zTXt": png(chunk(b"zTXt", b"k\0\0" + zeros(200))),
        "many zTXt": png(*[chunk(b"zTXt", b"k%d\0\0" % n + zlib.compress(bytes(1_000_000))) for n in range(75)]),
        "iTXt": itxt.getvalue(),
        "IDAT longer than its picture": png(pixels=zeros(300)),
        "100000 x 100000": png(width=100_000, height=100_000),
        "2^31 x 2^31": png(width=2**31 - 1, height=2**31 - 1),
        "0 x 0": png(width=0, height=0),
        "900 megapixels of one bit": grey.getvalue(),
        "JPEG of 20000 scans": jpeg[:-2] + last_scan * 20_000 + b"\xff\xd9",
        "WebP of 16383 x 16383": webp_head(16383, 16383),
    }


def webp_head(width: int, height: int) -> bytes:
    extended = b"VP8X" + struct.pack("<I", 10) + bytes(4)
    extended += (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBP" + extended + picture("webp")[12:]
    return b"RIFF" + struct.pack("<I", len(body)) + body


def mangled(data: bytes) -> st.SearchStrategy[bytes]:
    """`data` truncated, with bytes changed or duplicated, or with a prefix."""
    place = st.integers(0, max(0, len(data) - 1))
    return st.one_of(
        place.map(lambda end: data[:end]),
        st.lists(st.tuples(place, st.integers(1, 255)), min_size=1, max_size=20).map(lambda flips: flip(data, flips)),
        st.tuples(place, st.binary(max_size=64)).map(lambda cut: data[: cut[0]] + cut[1] + data[cut[0] :]),
        st.binary(min_size=1, max_size=16).map(lambda front: front + data),
        st.just(data + data),
    )


def flip(data: bytes, flips: list[tuple[int, int]]) -> bytes:
    content = bytearray(data)
    for place, change in flips:
        if content:
            content[place] ^= change
    return bytes(content)


# Made when the first is drawn: processes that collect these tests, but do not run them, need none.
good_pictures = st.deferred(
    lambda: st.sampled_from([picture("png"), picture("jpeg"), picture("webp"), picture("png", "P")])
)
odd_pictures = st.deferred(
    lambda: st.sampled_from(
        [picture(kind) for kind in FORMATS[3:]]
        + [picture("png", mode) for mode in ("1", "L", "LA", "RGBA", "I;16")]
        + [picture("jpeg", "CMYK"), b"", b"\0", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"GIF89a"]
        + [b"II*\0", b"RIFF", alpha_mask(), white_mask(), np.zeros(100_000, np.uint8).tobytes()]
    )
)
small_bombs = st.deferred(
    lambda: st.sampled_from([data for name, data in bombs().items() if "JPEG" not in name])  # seconds of work
)


def hostile_pictures() -> st.SearchStrategy[bytes]:
    return st.one_of(
        good_pictures.flatmap(mangled),
        good_pictures.flatmap(mangled),
        odd_pictures,
        st.binary(max_size=300),
        small_bombs,
    )
