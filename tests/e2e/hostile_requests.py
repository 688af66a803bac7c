"""Hypothesis strategies for requests from hostile clients, down to the bytes on the wire."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hostile_files import good_pictures, hostile_pictures, mangled, odd_pictures
from hypothesis import strategies as st
from pictures import white_mask

from entrypoints.openai.fields.fields import EDIT_FIELDS

SECRET = "wish-of-a-fuzzer"
"""The prompt of all requests, which must not appear in any log."""

BOUNDARY = b"----b0undary"
NAMES = [*EDIT_FIELDS, "image", "image[]", "image[0]", "image[99999999999]", "mask", "mask_image", "markup", "nope", ""]
NASTY_TEXTS = [
    "",
    " ",
    "0",
    "-0",
    "-1",
    "1",
    "1e999",
    "-1e999",
    "nan",
    "NaN",
    "inf",
    "-Infinity",
    "9" * 400,
    "0x10",
    "1_000",
    "1.5",
    "2147483648",
    "9223372036854775808",
    "-9223372036854775809",
    "1e-320",
    "true",
    "null",
    "undefined",
    "[]",
    "{}",
    "١٢٣",
    "\u0000",
    "a\u0000b",
    "\r\nx: y",
    "\u202e\u200b",
    "\U0001f600" * 50,
    "é" * 3000,
    "a" * 40_000,
    "../../etc/passwd",
    "file:///etc/passwd",
    "http://169.254.169.254/",
    "%s%n",
    "{{7*7}}",
    "'; --",
    "1024x1024",
    "auto",
    "99999x99999",
    "0x0",
    "16x16",
    "16X16",
    "tmpl_0",
    "b64_json",
    "url",
    "png",
    "jpeg",
    "webp",
    "transparent",
    "high",
]
SMALL = {"prompt": SECRET, "num_inference_steps": "1", "seed": "1"}
"""The fields of a request that costs little where it is accepted."""

often = st.sampled_from([True] * 9 + [False])
texts = st.one_of(st.sampled_from(NASTY_TEXTS), st.text(max_size=60), st.integers().map(str), st.floats().map(str))


@dataclass(frozen=True, repr=False)
class Request:
    """A request as sent over the wire. is_whole: the server can detect its end, so it has to answer."""

    head: bytes
    body: bytes = b""
    is_whole: bool = True

    @property
    def data(self) -> bytes:
        return self.head + self.body

    def __repr__(self) -> str:
        return f"Request({self.head[:1000]!r}, {self.body[:1000]!r}... of {len(self.data)} bytes, {self.is_whole})"


def request(method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes) -> Request:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return Request("\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape"), body)


# ----------------------------------------------------------------------------------------------------------- multipart


def quoted(text: str) -> bytes:
    return text.replace("\\", "\\\\").replace('"', '\\"').encode("utf-8", "surrogatepass")


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    disposition = b'Content-Disposition: form-data; name="%s"' % quoted(name)
    if filename is not None:
        disposition += b'; filename="%s"' % quoted(filename)
    return disposition + b"\r\n\r\n" + content


def text_parts(fields: dict[str, str]) -> list[bytes]:
    return [part(name, text.encode("utf-8", "surrogatepass")) for name, text in fields.items()]


def joined(parts: Sequence[bytes], boundary: bytes = BOUNDARY) -> bytes:
    return b"".join(b"--%s\r\n%s\r\n" % (boundary, one) for one in parts) + b"--%s--\r\n" % boundary


bad_fields = st.builds(
    lambda name, text: part(name, text.encode("utf-8", "surrogatepass")), st.sampled_from(NAMES), texts
)
bad_files = st.builds(
    part,
    st.sampled_from(["mask", "mask_image", "image", "image[]", "image[1]", *NAMES]),
    hostile_pictures(),
    st.one_of(st.just("a.png"), st.none(), texts),
)
ODD_PARTS = [
    b"",
    b"\r\n",
    b"\r\nno headers",
    b"no colon\r\n\r\nx",
    b": no name\r\n\r\nx",
    b"Content-Disposition: form-data\r\n\r\nno name",
    b"Content-Disposition: form-data; name=prompt; name=image\r\n\r\nx",
    b"Content-Disposition: form-data; name*=utf-8''prompt\r\n\r\nx",
    b'Content-Disposition: attachment; name="image"; filename="/etc/passwd"\r\n\r\nx',
    b'Content-Disposition: form-data; name="image"; filename="a\0b"\r\nContent-Transfer-Encoding: base64\r\n\r\neA==',
    b'Content-Disposition: form-data; name="prompt"\r\nContent-Type: text/plain; charset=utf-16\r\n\r\nx',
    b'Content-Disposition: form-data; name="prompt"\nx: y\n\nx',
    b'Content-Disposition: form-data; name="prompt"\r\n' + b"x: y\r\n" * 50 + b"\r\nx",
    b'Content-Disposition: form-data; name="' + b"n" * 10_000 + b'"\r\n\r\nx',
    b'Content-Disposition: form-data; name="prompt"\r\n\r\n\xff\xfe',
]
odd_parts = st.sampled_from(ODD_PARTS)
LARGE = part("image", bytes(3_500_000), "a.png")


@st.composite
def forms(draw: st.DrawFn) -> list[bytes]:
    """Forms that are mostly valid, so that errors in them are found late."""
    parts = text_parts(SMALL) if draw(often) else []
    if draw(often):
        parts.append(part("image", draw(st.one_of(hostile_pictures(), good_pictures)), "a.png"))
    match draw(st.sampled_from("ffffFFFFFFooxlb")):
        case "f":
            parts += draw(st.lists(bad_fields, min_size=1, max_size=3))
        case "F":
            parts += draw(st.lists(bad_files, min_size=1, max_size=3))
        case "o":
            parts.append(draw(odd_parts))
        case "x":
            parts += [part(f"x{number}", b"") for number in range(draw(st.sampled_from([20, 255, 300])))]
        case "l":
            parts.append(LARGE)
        case "b":
            parts += [draw(bad_fields), draw(bad_files), draw(odd_parts)]
    return list(draw(st.permutations(parts))) if len(parts) < 20 else parts


boundaries = st.sampled_from(
    ["", "b", "x" * 70, "x" * 71, "x" * 5000, '"quoted b"', "a\tb", "é", "--", "b; boundary=c", '"'],
)
media_types = st.sampled_from(
    ["multipart/form-data", "multipart/mixed", "application/x-www-form-urlencoded", "text/plain", "", ";", "a/b; c=d"]
)
multipart_paths = st.sampled_from(["/v1/images/edits"] * 6 + ["/v1/templates"] * 3 + ["/v1/images/generations"])


@st.composite
def multipart_requests(draw: st.DrawFn) -> Request:
    body = joined(draw(forms()))
    content_type = f"multipart/form-data; boundary={BOUNDARY.decode()}"
    match draw(st.sampled_from("-----------mbtf")):
        case "m":
            body = draw(mangled(body))
        case "b":
            content_type = f"multipart/form-data; boundary={draw(boundaries)}"
        case "t":
            content_type = f"{draw(media_types)}; boundary={BOUNDARY.decode()}"
        case "f":
            body = draw(st.binary(max_size=50)) + body + draw(st.binary(max_size=50))
    return request("POST", draw(multipart_paths), [("content-type", content_type)], body)


# ---------------------------------------------------------------------------------------------------------------- JSON

json_values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(NASTY_TEXTS), st.text(max_size=30)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)


def _source(url: str, is_plain: bool) -> Any:
    return url if is_plain else {"image_url": url}


sources = st.one_of(
    json_values,
    st.builds(
        lambda head, data, end, is_plain: _source(head + base64.b64encode(data).decode() + end, is_plain),
        st.sampled_from(
            ["data:image/png;base64,", "data:;base64,", "DATA:IMAGE/PNG;BASE64,", "data:,", "", "http://a/"]
        ),
        st.one_of(good_pictures, hostile_pictures()),
        st.sampled_from(["", "", "=", "\n", "!", "\\u0041", "=" * 50]),
        st.booleans(),
    ),
    st.sampled_from([{"image_url": url} for url in ("http://127.0.0.1:9/", "file:///etc/passwd", "//a", "", "data:")]),
    st.sampled_from([{"file_id": "file-1"}, {"image_url": {"url": "http://a/"}}, {}, {"image_url": None}]),
)


@st.composite
def json_bodies(draw: st.DrawFn) -> bytes:
    body: dict[str, Any] = {"prompt": SECRET, "num_inference_steps": 1} if draw(often) else {}
    if draw(often):
        body[draw(st.sampled_from(["images", "images", "image"]))] = draw(
            st.one_of(st.lists(sources, min_size=1, max_size=3), sources)
        )
    if draw(st.booleans()):
        body["mask"] = draw(sources)
    if not draw(often):
        body["mask_image"] = draw(st.one_of(json_values, st.just(base64.b64encode(white_mask(48, 48)).decode())))
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=2)):
        body[name] = draw(json_values)
    return json.dumps(body).encode("utf-8", "surrogatepass")


ODD_JSON = [
    b"",
    b"null",
    b"[]",
    b'"a"',
    b"{",
    b"{}{}",
    b"\xef\xbb\xbf{}",
    b"\xff\xfe{\0}\0",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"prompt": "p", "prompt": "q"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\xff"}',
    b'{"seed": 1e400}',
    b'{"n": 01}',
    b'{"seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "' + b"a" * 700_000 + b'"}',
    b'{"prompt": "' + b"\\" * 9999 + b'"}',
    b'{"a' + b"a" * 700_000,
    b"{" + b",".join(b'"k%d":1' % n for n in range(5000)) + b"}",
    b"{" + b" " * 1_100_000 + b"}",
]
json_types = st.sampled_from(["application/json"] * 8 + ["application/json; charset=utf-16", "text/json"])


@st.composite
def json_requests(draw: st.DrawFn) -> Request:
    body = draw(
        st.one_of(
            json_bodies(),
            json_bodies(),
            json_bodies(),
            json_bodies().flatmap(mangled),
            st.sampled_from(ODD_JSON),
        )
    )
    path = draw(st.sampled_from(["/v1/images/edits"] * 6 + ["/v1/images/generations"] * 3 + ["/v1/templates"]))
    return request("POST", path, [("content-type", draw(json_types))], body)


# ---------------------------------------------------------------------------------------------------- control pictures

CONTROLLED = "sd"
"""The served model that has ControlNets: "edges" and "depth"."""

CONTROL_TEXTS = [
    *(
        "edges",
        "depth",
        '["edges"]',
        '["edges", "depth"]',
        '["edges", 1]',
        '["edg',
        "0.5",
        "0",
        "1",
        "[0.5, 0.6]",
        "[1",
    ),
    *("[[1]]", "[NaN]", "[1e999]", "[]", "[null]", '{"a": 1}', "[" * 3000, "[" + "0," * 3000 + "0]", "10.0001", "-0.1"),
]
control_fields = st.dictionaries(
    st.sampled_from([f"control_{name}" for name in ("type", "scale", "start", "end")]),
    st.one_of(st.sampled_from(CONTROL_TEXTS), st.sampled_from(CONTROL_TEXTS), texts),
    max_size=2,
)
control_names = st.sampled_from(
    ["control_image"] * 2 + ["control_image[]"] * 3 + ["control_image[0]", "control_image[9]"]
)
some_pictures = st.one_of(good_pictures, good_pictures.flatmap(mangled), odd_pictures)  # several, so no bombs
edits_or_generations = st.sampled_from(["/v1/images/edits"] * 3 + ["/v1/images/generations"])


@st.composite
def controlled_forms(draw: st.DrawFn) -> Request:
    parts = text_parts(SMALL | {"model": CONTROLLED, "control_type": "edges"} | draw(control_fields))
    parts.append(part("image", draw(good_pictures), "a.png"))
    parts += [
        part(draw(control_names), each, "c.png") for each in draw(st.lists(some_pictures, min_size=1, max_size=5))
    ]
    if not draw(often):
        parts.append(part(draw(control_names), draw(texts).encode("utf-8", "surrogatepass")))
    content_type = f"multipart/form-data; boundary={BOUNDARY.decode()}"
    return request("POST", draw(edits_or_generations), [("content-type", content_type)], joined(parts))


@st.composite
def controlled_json(draw: st.DrawFn) -> Request:
    good = "data:image/png;base64," + base64.b64encode(draw(good_pictures)).decode()
    body: dict[str, Any] = SMALL | {"model": CONTROLLED, "num_inference_steps": 1, "seed": 1, "control_type": "edges"}
    body |= {"images": [{"image_url": good}], "control_image": draw(st.one_of(sources, st.lists(sources, max_size=5)))}
    path = draw(edits_or_generations)
    if path.endswith("generations"):
        del body["images"]
    for name in draw(control_fields):
        body[name] = draw(json_values)
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    return request("POST", path, [("content-type", "application/json")], content)


controlled_requests = st.one_of(controlled_forms(), controlled_forms(), controlled_json())

# --------------------------------------------------------------------------------------------------- paths and raw HTTP

PATHS = [
    "/",
    "//",
    "/v1",
    "/v1/",
    "/v1/images/edits/",
    "/v1/images/variations",
    "/v1/models/../../etc/passwd",
    "/v1/models/%2e%2e",
    "/v1/models/%00",
    "/v1/models/%ff%fe",
    "/v1/templates/%0d%0ax:y",
    "/v1/templates/" + "a" * 5000,
    "/%",
    "/%zz",
    "/v1/templates/",
    "*",
    "http://evil/v1/models",
    "/health?a=b&a=c",
    "/metrics;x",
    "/v1/engine/stats#a",
    "/docs",
    "/openapi.json",
    "/é",
    "/\u202e",
]
METHODS = [
    "GET",
    "HEAD",
    "PUT",
    "PATCH",
    "DELETE",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "PURGE",
    "get",
    "G E T",
    "",
    "QUERY",
    "X" * 300,
]
quiet_text = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x2FF), max_size=40)


@st.composite
def odd_paths(draw: st.DrawFn) -> Request:
    path = draw(st.one_of(st.sampled_from(PATHS), quiet_text.map(lambda text: f"/v1/templates/{text}")))
    headers = draw(st.lists(st.tuples(st.sampled_from(HEADERS), quiet_text), max_size=3))
    return request(draw(st.sampled_from([*METHODS, "POST"])), path, headers, draw(st.binary(max_size=20)))


HEADERS = [
    "authorization",
    "x-request-id",
    "traceparent",
    "tracestate",
    "x-forwarded-for",
    "x-forwarded-proto",
    "expect",
    "upgrade",
    "content-encoding",
    "accept",
    "cookie",
    "te",
    "range",
    "origin",
    "host",
    "x" * 2000,
    "bad name",
    "",
    "content-type",
]
POST = b"POST /v1/images/edits HTTP/1.1\r\n"
RAW = [
    b"",
    b"\r\n\r\n",
    b"\0" * 100,
    b"GET",
    b"GET /\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\nhost: localhost\n\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/1.1\r\nhost: localhost\r\nx:y:z\r\n y\r\n\r\n",
    POST + b"content-length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
    POST + b"content-length: 99999999999999999999999\r\n\r\n",
    POST + b"content-type: application/json\r\ncontent-length: 9999999999\r\n\r\n{",
    POST + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
    POST + b"transfer-encoding: gzip, chunked\r\ncontent-type: application/json\r\n\r\n1\r\n{\r\n0\r\n\r\n",
    POST + b"transfer-encoding: chunked\r\ncontent-type: application/json\r\n\r\nzz\r\n",
    POST + b"transfer-encoding: chunked\r\ncontent-type: application/json\r\n\r\nffffffffffffffffff\r\n",
    POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + b"t: u\r\n" * 3000 + b"\r\n",
    b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000 + b"\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nx: " + b"a" * 500_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n" * 200,
    b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: eA==\r\n\r\n",
    POST + b"content-type: application/json\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\n{}",
    b"GET /health HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" * 50 + b"CONNECT a:1 HTTP/1.1\r\n\r\n",
]
raw_requests = st.one_of(
    st.sampled_from(RAW),
    st.binary(max_size=200),
    st.sampled_from(RAW).filter(len).flatmap(lambda raw: mangled(raw[:2000])),
).map(lambda data: Request(data, is_whole=False))


@st.composite
def cut_requests(draw: st.DrawFn) -> Request:
    """Requests whose client disconnects before the end."""
    whole = draw(st.one_of(multipart_requests(), json_requests()))
    end = draw(st.integers(0, len(whole.data)))
    return Request(whole.data[:end], is_whole=False)


hostile_requests = st.one_of(
    *[multipart_requests()] * 7,
    *[json_requests()] * 4,
    odd_paths(),
    raw_requests,
    cut_requests(),
)
