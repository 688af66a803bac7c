"""Colour: a file's colour information (how to display its RGB values), copied from an upload to its results.

Edits change no pixel outside their mask, and these must look as before. A PNG file can state its colour space in four
ways, of which the first present counts: cICP (coding-independent code points, as in video: HDR, Display P3), iCCP (an
ICC profile), sRGB, and gAMA with cHRM (gamma and chromaticities); mDCV and cLLI describe the display on which an HDR
picture was mastered, and its brightest light. All of them are copied unchanged. WebP and JPEG files have only an ICC
profile.

Not copied: sBIT, the number of significant bits in the samples' source: it does not affect the display, and is wrong
for generated pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import pack

from PIL import Image

from core.messages.image_processor import OutputFormat
from engine.images.png_chunks import Bytes, chunks_before_pixels

MAX_ICC_BYTES = 512 * 1024  # a larger profile is not carried over, so that `encoded_bytes` can be a bound

_CHUNK_BYTES = {b"cICP": 4, b"sRGB": 1, b"gAMA": 4, b"cHRM": 32, b"mDCV": 24, b"cLLI": 8}
"""PNG chunks that are copied -> their length in bytes."""

_SRGB = {
    b"cICP": bytes((1, 13, 0, 1)),
    b"gAMA": pack(">I", 45455),
    b"cHRM": pack(">8I", 31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000),
}
"""Chunk contents that mean sRGB, which is also the default of a file without colour information."""

PngChunk = tuple[bytes, bytes]  # type, content


@dataclass(frozen=True, slots=True)
class Colour:
    """icc_profile: an RGB one. chunks: a PNG file's other chunks, in its order, one per type. has_unusable_profile: the
    file has a profile that results cannot have: not RGB, or larger than MAX_ICC_BYTES."""

    icc_profile: bytes | None = None
    chunks: tuple[PngChunk, ...] = ()
    has_unusable_profile: bool = False

    @classmethod
    def of(cls, file: Image.Image, data: Bytes) -> Colour:
        """Colour of an opened file. data: its bytes, uint8 [bytes]. Profiles for other colour spaces than RGB, which
        would be wrong for results, and chunks of the wrong length are left out."""
        profile = _rgb_profile(file)
        chunks = _chunks(data) if file.format == "PNG" else {}
        if profile is not None:
            chunks.pop(b"sRGB", None)  # a PNG file may have only one of the two
        return cls(profile, tuple(chunks.items()), profile is None and bool(file.info.get("icc_profile")))

    def lost_in(self, output_format: OutputFormat) -> tuple[str, ...]:
        """Information that the format cannot hold and without which the picture is displayed differently: "ICC profile"
        or names of PNG chunks."""
        present = dict(self.chunks)
        if self.has_unusable_profile and b"cICP" not in present:
            return ("ICC profile",)
        if output_format == "png":
            return ()
        return tuple(kind.decode() for kind in self._display_chunks if present.get(kind, _SRGB[kind]) != _SRGB[kind])

    @property
    def _display_chunks(self) -> tuple[bytes, ...]:
        """Types of the chunks that determine the display; none if an ICC profile or sRGB does."""
        kinds = {kind for kind, _ in self.chunks}
        if b"cICP" in kinds:
            return (b"cICP",)
        return () if self.icc_profile is not None or b"sRGB" in kinds else (b"gAMA", b"cHRM")


NO_COLOUR = Colour()
"""Of a file without colour information: sRGB."""


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
