"""Colour: what a file says of how its RGB values are to be displayed, carried over from an upload to its results.

Edits change no pixel outside their mask, and these are to look as before. A PNG file has four ways to say what its
values mean, of which the first that is there counts: cICP (coding-independent code points, as in video: HDR, Display
P3), iCCP (an ICC profile), sRGB, and gAMA with cHRM (gamma and chromaticities); mDCV and cLLI describe the display that
an HDR picture was made on, and its brightest light. All of them are kept, as they came. WebP and JPEG files have an ICC
profile and nothing else.

Not kept: sBIT, the number of bits that were significant in the samples' source, which changes nothing on a display and
is not true of generated pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import pack

from PIL import Image

from core.messages.image_processor import OutputFormat
from engine.images.png_chunks import Bytes, chunks_before_pixels

MAX_ICC_BYTES = 512 * 1024  # a larger profile is not carried over, so that `encoded_bytes` can be a bound

_CHUNK_BYTES = {b"cICP": 4, b"sRGB": 1, b"gAMA": 4, b"cHRM": 32, b"mDCV": 24, b"cLLI": 8}
"""PNG's chunks that are kept -> their length."""

_SRGB = {
    b"cICP": bytes((1, 13, 0, 1)),
    b"gAMA": pack(">I", 45455),
    b"cHRM": pack(">8I", 31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000),
}
"""What says no more than that values are sRGB, as they are taken where nothing is said."""

PngChunk = tuple[bytes, bytes]  # type, content


@dataclass(frozen=True, slots=True)
class Colour:
    """icc_profile: an RGB one. chunks: a PNG file's other chunks, in its order, one of a type. has_unusable_profile:
    there was one that no result can have."""

    icc_profile: bytes | None = None
    chunks: tuple[PngChunk, ...] = ()
    has_unusable_profile: bool = False

    @classmethod
    def of(cls, file: Image.Image, data: Bytes) -> Colour:
        """Of an opened file, uint8 [bytes]. A profile for another colour space than RGB is left out, as it would be
        wrong for the result; so are chunks of the wrong length."""
        profile = _rgb_profile(file)
        chunks = _chunks(data) if file.format == "PNG" else {}
        if profile is not None:
            chunks.pop(b"sRGB", None)  # a PNG file may have one of both
        return cls(profile, tuple(chunks.items()), profile is None and bool(file.info.get("icc_profile")))

    def lost_in(self, output_format: OutputFormat) -> tuple[str, ...]:
        """What of this a file of this format does not hold, and is displayed differently without: an ICC profile,
        or PNG's chunks by their names."""
        told = dict(self.chunks)
        if self.has_unusable_profile and b"cICP" not in told:
            return ("ICC profile",)
        if output_format == "png":
            return ()
        return tuple(kind.decode() for kind in self._what_counts if told.get(kind, _SRGB[kind]) != _SRGB[kind])

    @property
    def _what_counts(self) -> tuple[bytes, ...]:
        """The chunks that a display goes by, without those that do no more than an ICC profile or than nothing."""
        kinds = {kind for kind, _ in self.chunks}
        if b"cICP" in kinds:
            return (b"cICP",)
        return () if self.icc_profile is not None or b"sRGB" in kinds else (b"gAMA", b"cHRM")


NO_COLOUR = Colour()
"""Of a file that says nothing: sRGB."""


def _rgb_profile(file: Image.Image) -> bytes | None:
    profile = file.info.get("icc_profile")
    # Bytes 16..20 of a profile name its colour space: a grey or CMYK profile would be wrong on RGB pixels.
    usable = isinstance(profile, bytes) and profile[16:20] == b"RGB " and len(profile) <= MAX_ICC_BYTES
    return profile if usable else None


def _chunks(data: Bytes) -> dict[bytes, bytes]:
    """The first of each type counts, as in libpng."""
    found: dict[bytes, bytes] = {}
    for kind, content in chunks_before_pixels(data):
        if len(content) == _CHUNK_BYTES.get(kind):
            found.setdefault(kind, bytes(content))
    return found
