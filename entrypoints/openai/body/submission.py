"""Reads the body of a request, multipart or JSON, into a Submission: parsed values, uploads, and names of unknown
fields. Enforces all limits on its size while it arrives.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeVar, cast

import msgspec
from starlette.requests import Request

from core.errors import InvalidRequestError
from core.graph.form import MAX_FORM_BYTES, MAX_SIDES, TENSOR_BYTES
from core.lora import Lora
from engine.client.input_files import InputFiles, TensorFile
from entrypoints.openai.answer.errors import UnsupportedContentTypeError
from entrypoints.openai.body.chunks import body_too_large, read_chunks
from entrypoints.openai.body.json_body import LONG_STRING_BYTES, JsonBody
from entrypoints.openai.body.multipart import Part, read_multipart
from entrypoints.openai.body.uploads import SpooledUpload, StoredUpload, decode_base64, pieces_of
from entrypoints.openai.fields.field import Field, Value, decode_json
from entrypoints.openai.fields.fields import EDIT_FIELDS, GENERATION_FIELDS, TEMPLATE_FIELDS
from entrypoints.openai.fields.own_fields import MODEL_FIELD, NOTHING_OWN, OwnFields, OwnFieldsByModel

MAX_INPUT_IMAGES = 16  # per request; all but the first are references
MAX_TEXT_BYTES = 1024 * 1024  # of all text fields of a form, or of a JSON body without its images
MAX_MEMBERS = 256  # of a JSON body; equals the limit on a form's parts
MULTIPART = "multipart/form-data"
JSON = "application/json"
T = TypeVar("T")
_JsonImage = str | dict[str, msgspec.Raw]
"""An image of a JSON body: a data: URL, or an object with `image_url`, as OpenAI's API has it."""
_JSON_IMAGE = "a data: URL or an object with one as 'image_url'"
_JSON_TENSOR = "an object of JSON with 'dtype', 'shape' and 'base64'"
_Side = Annotated[int, msgspec.Meta(ge=0, le=MAX_FORM_BYTES)]
_UPLOAD_FIELDS = ("image", "mask", "mask_image")
_FILE_FIELDS = (*_UPLOAD_FIELDS, "reference_image", "control_image", "markup")
_PICTURE_LISTS = ("image", "reference_image", "control_image")


class _JsonTensor(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor of a JSON body, as answers show one."""

    dtype: Annotated[str, msgspec.Meta(max_length=max(map(len, TENSOR_BYTES)))]
    shape: Annotated[tuple[_Side, ...], msgspec.Meta(max_length=MAX_SIDES)]
    base64: str  # its bytes, little-endian, row by row


@dataclass
class Submission:
    """The content of one request body. `close` frees the uploads."""

    values: dict[str, Value] = field(default_factory=dict)  # field -> parsed value, in the order of arrival
    uploads: dict[str, StoredUpload] = field(default_factory=dict)  # image, mask, mask_image
    references: dict[str, StoredUpload] = field(default_factory=dict)  # image[1] .., reference_image[0] .., in order
    controls: dict[str, StoredUpload] = field(default_factory=dict)  # control_image[0] .., in order
    ignored: list[str] = field(default_factory=list)  # unknown fields, in the order of arrival
    own: OwnFields | None = None  # of the workflow of users' classes that it names, or that its model has
    own_pictures: dict[str, StoredUpload] = field(default_factory=dict)  # input of that workflow -> its file
    own_tensors: dict[str, TensorFile] = field(default_factory=dict)  # input of that workflow -> its tensor

    @property
    def model(self) -> str:
        """The model that it names; "" for the first one."""
        return str(self.values.get("model", ""))

    @property
    def loras(self) -> tuple[Lora, ...]:
        """The adapters that it names."""
        return cast(tuple[Lora, ...], self.values.get("lora", ()))

    @property
    def steps_without_lora(self) -> int:
        """See SamplingParams."""
        return cast(int, self.values.get("steps_without_lora", 0))

    @property
    def input_files(self) -> InputFiles:
        """What it gives that workflow as files."""
        return InputFiles(pictures=self.own_pictures, tensors=self.own_tensors)

    def close(self) -> None:
        for upload in self.files:
            upload.close()

    @property
    def files(self) -> list[StoredUpload]:
        """All uploads."""
        pictures = (self.uploads, self.references, self.controls, self.own_pictures)
        tensors = (cast(SpooledUpload, tensor.content) for tensor in self.own_tensors.values())
        return [*(upload for each in pictures for upload in each.values()), *tensors]


async def read_edit(
    request: Request,
    max_upload_bytes: int,
    *,
    max_references: int = 0,
    max_controls: int = 0,
    fields: Mapping[str, Field] = EDIT_FIELDS,
    own: OwnFieldsByModel = NOTHING_OWN,
) -> Submission:
    """Read the body of POST /v1/images/edits or /v1/images/masks: multipart, or JSON with data: URLs. max_upload_bytes:
    per file. max_references, max_controls: as many as any served model takes; further ones are empty. fields: that it
    may have. own: what workflows of users' classes take, too.

    Raises InvalidRequestError and below, BodyTimeoutError, NoDiskError, and AbortedError if the client disconnects.
    """
    content_type = request.headers.get("content-type", "")
    form = replace(_EDIT_FORM, fields=fields, max_references=max_references, max_controls=max_controls, own=own)
    match _media_type(content_type):
        case "multipart/form-data":
            return await _read_multipart(request, content_type, max_upload_bytes, form)
        case "application/json":
            return await _read_json_pictures(request, max_upload_bytes, form)
        case other:
            raise UnsupportedContentTypeError(other, f"{MULTIPART} or {JSON}")


async def read_generation(
    request: Request, max_upload_bytes: int, max_controls: int, own: OwnFieldsByModel = NOTHING_OWN
) -> Submission:
    """Read the body of POST /v1/images/generations: multipart, or JSON with data: URLs. The rest as `read_edit`."""
    content_type = request.headers.get("content-type", "")
    form = replace(_GENERATION_FORM, max_controls=max_controls, own=own)
    match _media_type(content_type):
        case "multipart/form-data":
            return await _read_multipart(request, content_type, max_upload_bytes, form)
        case "application/json":
            return await _read_json_pictures(request, max_upload_bytes, form)
        case other:
            raise UnsupportedContentTypeError(other, f"{JSON} or {MULTIPART}")


async def read_template(request: Request, max_upload_bytes: int) -> Submission:
    """Read the body of POST /v1/templates: multipart. Raises as `read_edit`."""
    content_type = request.headers.get("content-type", "")
    if _media_type(content_type) != MULTIPART:
        raise UnsupportedContentTypeError(_media_type(content_type), MULTIPART)
    return await _read_multipart(request, content_type, max_upload_bytes, _TEMPLATE_FORM)


async def read_json(request: Request, fields: Mapping[str, Field]) -> Submission:
    """Read a JSON body without pictures. Raises as `read_edit`."""
    media_type = _media_type(request.headers.get("content-type", ""))
    if media_type != JSON:
        raise UnsupportedContentTypeError(media_type, JSON)
    submission = Submission()
    with closing(await _read_json(request, MAX_TEXT_BYTES)) as body:
        _take_json_scalars(submission, _members(body), fields, body)
    return submission


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


# ----------------------------------------------------------------------------------------------------------- multipart


@dataclass(frozen=True)
class _Form:
    """What a form may contain."""

    fields: Mapping[str, Field]
    files: tuple[str, ...]  # names of the file fields that are kept
    max_images: int
    max_references: int = 0  # that are kept
    max_controls: int = 0  # that are kept
    own: OwnFieldsByModel = NOTHING_OWN

    def is_own_file(self, base: str) -> bool:
        """Whether a text of this name may be a picture or tensor of a workflow."""
        return base in self.own.files and base not in self.fields


_EDIT_FORM = _Form(EDIT_FIELDS, (*_UPLOAD_FIELDS, "reference_image", "control_image"), MAX_INPUT_IMAGES)
_GENERATION_FORM = _Form(GENERATION_FIELDS, ("control_image",), MAX_INPUT_IMAGES)
_TEMPLATE_FORM = _Form(TEMPLATE_FIELDS, ("image",), 1)


async def _read_multipart(request: Request, content_type: str, max_upload_bytes: int, form: _Form) -> Submission:
    def rule(part: Part, earlier: Sequence[Part]) -> tuple[int, bool]:
        """Keep only the first part of each known field, and references. All text parts together may have
        MAX_TEXT_BYTES."""
        base = _base_name(part.name)
        is_first = all(_base_name(other.name) != base for other in earlier if other.received)
        if part.is_file:
            kept = [_base_name(other.name) for other in earlier if other.keep]
            num_references = max(0, kept.count("image") - 1) + kept.count("reference_image")
            is_reference = base == "reference_image" or (base == "image" and not is_first)
            is_kept = num_references < form.max_references if is_reference else is_first
            if base == "control_image":
                is_kept = kept.count("control_image") < form.max_controls
            return max_upload_bytes, (base in form.files and is_kept) or (base in form.own.files and is_first)
        if is_file(base):
            return _base64_bytes(max_upload_bytes), is_first
        left = MAX_TEXT_BYTES - sum(
            other.received for other in earlier if not other.is_file and not is_file(_base_name(other.name))
        )
        return left, (base in form.fields or base in form.own.names) and is_first

    def is_file(base: str) -> bool:
        """Whether a text of this name has a file's content in base64."""
        return (base == "mask_image" and base in form.files) or form.is_own_file(base)

    limit = (form.max_images + 2) * max_upload_bytes + (1 + form.own.most_files) * _base64_bytes(max_upload_bytes)
    parts = await read_multipart(read_chunks(request, limit), content_type, rule)
    submission = Submission()
    with ExitStack() as on_error:
        on_error.callback(submission.close)
        with ExitStack() as unused:
            for part in parts:
                unused.callback(_close_unless_used, part, submission)
            await _take_parts(submission, parts, max_upload_bytes, form)
        on_error.pop_all()
    return submission


def _close_unless_used(part: Part, submission: Submission) -> None:
    if all(part.content is not upload for upload in submission.files):
        part.content.close()


async def _take_parts(submission: Submission, parts: list[Part], max_upload_bytes: int, form: _Form) -> None:
    taken = dict.fromkeys(_PICTURE_LISTS, 0)
    own = submission.own = form.own.of(await _model_of(parts))
    fields = own.over(form.fields) if own else form.fields
    for part in parts:
        if part.is_empty_file_input:
            continue
        base = _base_name(part.name)
        if own and base in own.pictures:
            await _take_own_picture(submission, part, base, max_upload_bytes)
        elif own and base in own.tensors:
            await _take_own_tensor(submission, part, max_upload_bytes)
        elif own and own.is_alone:
            await _take_own_text(submission, part, own, fields)
        elif base in taken and base in form.files:
            _take_picture(submission, part, base, taken, form.max_images)
        elif base in form.files or base == "markup":
            await _take_file(submission, part, base, max_upload_bytes)
        elif part.name in fields:
            await _take_text(submission, part, fields)
        else:
            _refuse_split(part.name, own)
            _ignore(submission, part.name)


async def _model_of(parts: Sequence[Part]) -> str:
    """The model that a form names."""
    named = next((part for part in parts if part.name == MODEL_FIELD and not part.is_file), None)
    return "" if named is None else await named.text()


async def _take_own_picture(submission: Submission, part: Part, base: str, max_upload_bytes: int) -> None:
    """A picture of a workflow: a file, or base64 text, since clients of OpenAI's API send no further files."""
    if base in submission.own_pictures:
        raise _duplicate(base)
    if part.is_file:
        submission.own_pictures[base] = part.content
    else:
        submission.own_pictures[base] = await decode_base64(part.content.chunks(), base, max_upload_bytes)


async def _take_own_tensor(submission: Submission, part: Part, max_upload_bytes: int) -> None:
    """A tensor of a workflow: text or a file, with what the member of a JSON body has."""
    if part.name in submission.own_tensors:
        raise _duplicate(part.name)
    body = JsonBody()
    with closing(body):
        async for chunk in part.content.chunks():
            await body.feed(chunk)
            if len(body.text) > MAX_TEXT_BYTES:
                raise _too_long(part.name, part.content.size)
        try:
            raw = decode_json(body.text, msgspec.Raw)
        except InvalidRequestError as error:
            raise _invalid_type(part.name, _JSON_TENSOR, "something else") from error
        await _keep_tensor(submission, part.name, raw, body, max_upload_bytes)


async def _keep_tensor(
    submission: Submission, name: str, raw: msgspec.Raw, body: JsonBody, max_upload_bytes: int
) -> None:
    """Decode a tensor. raw: its JSON, which is in a body."""
    if (tensor := _member(raw, _JsonTensor, name, _JSON_TENSOR)) is not None:
        content = await decode_base64(_pieces(body, tensor.base64), name, max_upload_bytes)
        submission.own_tensors[name] = TensorFile(dtype=tensor.dtype, shape=tensor.shape, content=content)


async def _take_own_text(submission: Submission, part: Part, own: OwnFields, fields: Mapping[str, Field]) -> None:
    """A part for a workflow that is none of its pictures. Files that it does not take are ignored."""
    if part.name in fields and not (part.is_file and part.name not in own.fields):
        await _take_text(submission, part, fields)
    else:
        _refuse_split(part.name, own)
        _ignore(submission, part.name)


def _refuse_split(name: str, own: OwnFields | None) -> None:
    """Refuse what some clients make of an object or array: left out, the picture would be another one."""
    base, bracket, _ = name.partition("[")
    what = ""
    if own and base in own.tensors:
        what = "JSON"
    elif base == "lora" and not (own and own.is_alone):
        what = "a name or JSON"
    if bracket and what:
        message = f"Invalid '{base}': in a form it is one text, {what}, and not spread over several fields."
        raise InvalidRequestError(message, param=base)


def _take_picture(submission: Submission, part: Part, base: str, taken: dict[str, int], max_images: int) -> None:
    """taken: field -> pictures of it so far; counted here."""
    name = f"{base}[{taken[base]}]"
    if not part.is_file:
        raise _expected_file(base, name)
    taken[base] += 1
    if sum(taken.values()) > max_images:
        raise _too_many_images(sum(taken.values()), max_images, base)
    if name == "image[0]":
        submission.uploads["image"] = part.content
    elif base == "control_image":
        submission.controls[name] = part.content
    else:
        submission.references[name] = part.content


async def _take_file(submission: Submission, part: Part, base: str, max_upload_bytes: int) -> None:
    _refuse_markup(base)
    if part.name != base:
        raise _invalid_type(base, "a file", "an array")
    if base in submission.uploads:
        raise _duplicate(base)
    if part.is_file:
        submission.uploads[base] = part.content
    elif base == "mask_image":
        submission.uploads[base] = await decode_base64(part.content.chunks(), base, max_upload_bytes)
    else:
        raise _expected_file(base, base)


async def _take_text(submission: Submission, part: Part, fields: Mapping[str, Field]) -> None:
    field = fields[part.name]
    if part.is_file:
        raise _invalid_type(part.name, f"a {field.kind}", "a file")
    if part.name in submission.values:
        raise _duplicate(part.name)
    if part.content.size > MAX_TEXT_BYTES:  # files of other workflows may have this name, and more bytes
        raise _too_long(part.name, part.content.size)
    if (value := field.from_text(await part.text())) is not None:
        submission.values[part.name] = value


def _base_name(name: str) -> str:
    """``image[]`` and ``image[0]`` -> ``image``, for file fields only; other names are returned unchanged."""
    base = name.partition("[")[0]
    return base if base in _FILE_FIELDS and name.endswith(("]", base)) else name


# ---------------------------------------------------------------------------------------------------------------- JSON


async def _read_json_pictures(request: Request, max_upload_bytes: int, form: _Form) -> Submission:
    num_kept = form.max_controls + (2 + form.max_references if "image" in form.files else 0)
    num_files = num_kept + form.own.most_files
    limit = num_files * _base64_bytes(max_upload_bytes) + MAX_TEXT_BYTES
    submission = Submission()

    async def take(into: dict[str, StoredUpload], pictures: Mapping[str, str], most: int) -> None:
        """Decode the first pictures of a list; the others are empty."""
        for number, (name, text) in enumerate(pictures.items()):
            given_as = name.partition("[")[0]
            pieces = _pieces(body, text)
            into[name] = (
                await decode_base64(pieces, given_as, max_upload_bytes, needs_data_url=True)
                if number < most
                else SpooledUpload()
            )

    with ExitStack() as on_error, closing(await _read_json(request, limit, num_files)) as body:
        on_error.callback(submission.close)
        members = _members(body)
        own = submission.own = form.own.of(_member(members.get(MODEL_FIELD), str, MODEL_FIELD, "a string") or "")
        fields = own.over(form.fields) if own else form.fields
        pictures = _pop_own_pictures(members, own) if own else {}
        tensors = {name: members.pop(name) for name in own.tensors if name in members} if own else {}
        is_alone = own is not None and own.is_alone
        sources, references = _pop_images(members) if "image" in form.files and not is_alone else ({}, {})
        controls = {} if is_alone else _pop_controls(members)
        await _put_back_texts(members, own.fields if own else (), body, MAX_TEXT_BYTES - _text_bytes(body, num_files))
        _take_json_scalars(submission, members, fields, body)
        await take(submission.own_pictures, pictures, len(pictures))
        for name, raw in tensors.items():
            await _keep_tensor(submission, name, raw, body, max_upload_bytes)
        for name, (text, needs_data_url) in sources.items():
            submission.uploads[name] = await decode_base64(
                _pieces(body, text), name, max_upload_bytes, needs_data_url=needs_data_url
            )
        await take(submission.references, references, form.max_references)
        await take(submission.controls, controls, form.max_controls)
        on_error.pop_all()
    return submission


def _pieces(body: JsonBody, text: str) -> AsyncIterator[bytes]:
    """The characters of a string of the body, or of what its marker stands for."""
    return body.long_strings[text].chunks() if text in body.long_strings else _text_pieces(text)


async def _read_json(request: Request, limit: int, num_files: int = 0) -> JsonBody:
    """Read a JSON body of at most `limit` bytes, of which at most MAX_TEXT_BYTES are neither in long strings nor in as
    many shorter ones as it may have files: small files are such.
    """
    body = JsonBody()
    with ExitStack() as on_error:
        on_error.callback(body.close)
        async for chunk in read_chunks(request, limit):
            await body.feed(chunk)
            if _text_bytes(body, num_files) > MAX_TEXT_BYTES:
                raise body_too_large(MAX_TEXT_BYTES)
        on_error.pop_all()
    return body


def _text_bytes(body: JsonBody, num_files: int) -> int:
    """Bytes of a body that are in no file, as far as is known before it is parsed."""
    return len(body.text) - min(body.string_bytes, num_files * LONG_STRING_BYTES)


async def _put_back_texts(
    members: dict[str, msgspec.Raw], names: Iterable[str], body: JsonBody, most_bytes: int
) -> None:
    """Replace markers of long strings by these strings where they are inputs of a workflow. most_bytes: of all of them.
    Raises RequestTooLargeError, and InvalidRequestError if one is not UTF-8.
    """
    of_markers = {f'"{marker}"'.encode(): upload for marker, upload in body.long_strings.items()}
    for name in names:
        upload = of_markers.get(bytes(memoryview(members[name]))) if name in members else None
        if upload is None:
            continue
        if (most_bytes := most_bytes - upload.size) < 0:
            raise body_too_large(MAX_TEXT_BYTES)
        try:
            members[name] = msgspec.Raw(msgspec.json.encode((await upload.read()).decode()))
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"Invalid '{name}': not valid UTF-8.", param=name) from error


def _members(body: JsonBody) -> dict[str, msgspec.Raw]:
    try:
        members = decode_json(body.text, dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        raise InvalidRequestError("The JSON body must be an object.", code="invalid_json") from error
    if len(members) > MAX_MEMBERS:
        raise InvalidRequestError(f"The JSON body has more than {MAX_MEMBERS} members.", code="invalid_json")
    return members


def _pop_images(members: dict[str, msgspec.Raw]) -> tuple[dict[str, tuple[str, bool]], dict[str, str]]:
    """Remove the image fields from `members`: (field -> (base64 text or its marker, whether it must be a data: URL),
    name of a reference -> data: URL or its marker).
    """
    sources, references = {}, {}
    one = _member(members.pop("image", None), _JsonImage | list[_JsonImage], "image", _JSON_IMAGE)  # type: ignore[arg-type]
    images = _member(members.pop("images", None), list[_JsonImage], "image", f"an array, each member {_JSON_IMAGE}")
    if one:
        if images:
            raise _duplicate("image")
        images = one if isinstance(one, list) else [one]
    listed, what = members.pop("reference_images", None), f"an array, each member {_JSON_IMAGE}"
    beside = _member(listed, list[_JsonImage], "reference_images", what) or []
    if images:
        sources["image"] = (_image_url(images[0], "image"), True)
        for index, image in enumerate(images[1:], start=1):
            references[f"image[{index}]"] = _image_url(image, "image")
    for index, image in enumerate(beside):
        references[f"reference_image[{index}]"] = _image_url(image, "reference_image")
    if len(images or []) + len(beside) > MAX_INPUT_IMAGES:
        given_as = "reference_images" if beside else "image"
        raise _too_many_images(len(images or []) + len(beside), MAX_INPUT_IMAGES, given_as)
    mask = _member(members.pop("mask", None), _JsonImage, "mask", _JSON_IMAGE)  # type: ignore[arg-type]
    if mask is not None:
        sources["mask"] = (_image_url(mask, "mask"), True)
    if (text := _member(members.pop("mask_image", None), str, "mask_image", "a string")) is not None:
        sources["mask_image"] = (text, False)
    if _member(members.pop("markup", None), msgspec.Raw, "markup", "an object") is not None:
        _refuse_markup("markup")
    return sources, references


def _pop_own_pictures(members: dict[str, msgspec.Raw], own: OwnFields) -> dict[str, str]:
    """Remove the pictures of a workflow from `members`: input -> data: URL or its marker. `images` of one picture is
    `image`, as in edits."""
    if "image" in own.pictures and "image" not in members and "images" in members:
        images = _member(members.pop("images"), list[msgspec.Raw], "image", f"an array, each member {_JSON_IMAGE}")
        if images and len(images) > 1:
            raise _too_many_images(len(images), 1)
        if images:
            members["image"] = images[0]
    given = dict[str, str]()
    for name in own.pictures:
        picture = _member(members.pop(name, None), _JsonImage, name, _JSON_IMAGE)  # type: ignore[arg-type]
        if picture is not None:
            given[name] = _image_url(picture, name)
    return given


def _pop_controls(members: dict[str, msgspec.Raw]) -> dict[str, str]:
    """Remove the control pictures from `members`: name of each -> data: URL or its marker."""
    expected = f"{_JSON_IMAGE}, or an array of them"
    given = _member(members.pop("control_image", None), _JsonImage | list[_JsonImage], "control_image", expected)  # type: ignore[arg-type]
    pictures = given if isinstance(given, list) else [given] if given else []
    if len(pictures) > MAX_INPUT_IMAGES:
        raise _too_many_images(len(pictures), MAX_INPUT_IMAGES, "control_image")
    return {f"control_image[{index}]": _image_url(each, "control_image") for index, each in enumerate(pictures)}


def _take_json_scalars(
    submission: Submission, members: dict[str, msgspec.Raw], fields: Mapping[str, Field], body: JsonBody
) -> None:
    for name, raw in members.items():
        if name not in fields:
            _ignore(submission, name)
        elif (value := fields[name].from_json(raw)) is not None:
            texts = [each.name for each in value if isinstance(each, Lora)] if isinstance(value, tuple) else [value]
            if too_long := [str(text) for text in texts if text in body.long_strings]:
                raise _too_long(name, body.long_strings[too_long[0]].size)
            submission.values[name] = value


def _image_url(source: _JsonImage, param: str) -> str:
    if isinstance(source, str):
        return source
    text = _member(source.get("image_url"), str, param, "a string")
    if text is None:
        message = f"Invalid '{param}': only 'image_url' with a data: URL is supported."
        raise InvalidRequestError(message, param=param, code="unsupported_value")
    return text


def _member(raw: msgspec.Raw | None, type_: type[T], param: str, expected: str) -> T | None:
    if raw is None or bytes(memoryview(raw)[:4]) == b"null":
        return None
    try:
        return decode_json(raw, type_)
    except msgspec.ValidationError as error:
        raise _invalid_type(param, expected, "something else") from error


async def _text_pieces(text: str) -> AsyncIterator[bytes]:
    for piece in pieces_of(text.encode("utf-8", "replace")):
        yield piece


# -------------------------------------------------------------------------------------------------------------- common


def _base64_bytes(size: int) -> int:
    """Upper bound on the base64 text of `size` bytes, with line breaks and the head of a data: URL."""
    return size * 3 // 2 + 1024


def _ignore(submission: Submission, name: str) -> None:
    if name not in submission.ignored:
        submission.ignored.append(name[:64])


def _refuse_markup(name: str) -> None:
    if name == "markup":
        raise InvalidRequestError("Unsupported parameter: 'markup'.", param="markup", code="unsupported_parameter")


def _too_many_images(count: int, limit: int, field: str = "image") -> InvalidRequestError:
    images = "1 image" if limit == 1 else f"{limit} images"
    message = f"Invalid '{field}': array too long. Expected at most {images}, but got {count} instead."
    return InvalidRequestError(message, param=field, code="array_above_max_length")


def _too_long(name: str, size: int) -> InvalidRequestError:
    message = f"Invalid '{name}': string too long; it has {size} bytes."
    return InvalidRequestError(message, param=name, code="string_above_max_length")


def _expected_file(param: str, shown: str) -> InvalidRequestError:
    message = f"Invalid type for '{shown}': expected a file, but got a string instead."
    return InvalidRequestError(message, param=param, code="invalid_type")


def _invalid_type(param: str, expected: str, got: str) -> InvalidRequestError:
    message = f"Invalid type for '{param}': expected {expected}, but got {got} instead."
    return InvalidRequestError(message, param=param, code="invalid_type")


def _duplicate(name: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid '{name}': given more than once.", param=name)
