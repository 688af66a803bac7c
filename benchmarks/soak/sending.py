"""Sender: sends an edit in one of several ways, as real clients do, and returns what came as one kind of Answer."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import APIConnectionError, APIError, APIStatusError, AsyncOpenAI

from benchmarks.soak.edits import Delivery, Edit
from benchmarks.soak.ledger import Ledger
from benchmarks.soak.pictures import template_file, transparent_mask, white_mask
from benchmarks.soak.transport import REQUEST_SECONDS, RETRIES, watched_client

MAX_WAIT_SECONDS = 60.0


class RefusedError(Exception):
    """An answer that is no picture. status: of HTTP; 200 for an error within a stream, 0 for no answer at all, which
    the wire has blamed already. code: of OpenAI's error envelope."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.code = code


@dataclass
class Answer:
    """What came back. pictures: files, in the order of their seeds; partials: (index, file) as they came."""

    pictures: list[bytes] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    partials: list[tuple[int, bytes]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


class Sender:
    """One OpenAI client and one plain one, both on the watched wire; for any number of tasks."""

    def __init__(self, url: str, ledger: Ledger) -> None:
        self.plain = watched_client(url, ledger)
        self._wire = watched_client(url, ledger)
        self._ledger = ledger
        self._openai = AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=RETRIES,
            http_client=self._wire,  # type: ignore[arg-type]  # takes httpx's as well as httpx2's
            timeout=REQUEST_SECONDS,
        )

    async def aclose(self) -> None:
        await self.plain.aclose()
        await self._openai.close()

    async def send(self, edit: Edit, delivery: Delivery, template_id: str | None = None) -> Answer:
        """Send it and wait for its pictures; refusals for now are obeyed. Raises RefusedError."""
        self._ledger.count("requests")
        try:
            match delivery.way:
                case "openai":
                    return _answer(await self._by_openai(edit, delivery, template_id))
                case "stream":
                    return await self._by_stream(edit, delivery, template_id)
                case "json":
                    return _answer(await self._by_json(edit, delivery, template_id))
        except APIStatusError as error:
            raise RefusedError(error.status_code, str(error.code), error.message) from error
        except APIConnectionError as error:
            raise RefusedError(0, "", repr(error.__cause__)) from error
        except APIError as error:
            raise RefusedError(200, str(error.code), error.message) from error

    async def _by_openai(self, edit: Edit, delivery: Delivery, template_id: str | None) -> dict[str, Any]:
        client = self._openai.with_options(max_retries=0) if delivery.is_hasty else self._openai
        images: Any = client.images
        if edit.template is None:
            return await images.generate(**_words(edit, delivery))  # type: ignore[no-any-return]
        call = images.edit(**_files(edit, delivery, template_id), **_words(edit, delivery, template_id))
        return await call  # type: ignore[no-any-return]

    async def _by_stream(self, edit: Edit, delivery: Delivery, template_id: str | None) -> Answer:
        images: Any = self._openai.images
        words = _words(edit, delivery, template_id) | {"stream": True, "partial_images": edit.partial_images}
        if edit.template is None:
            events = await images.generate(**words)
        else:
            events = await images.edit(**_files(edit, delivery, template_id), **words)
        answer, finals = Answer(), list[tuple[int, bytes]]()
        async for event in events:
            _take_event(event.to_dict(), answer, finals)
        for seed, picture in sorted(finals, key=lambda final: final[0]):
            answer.seeds.append(seed)
            answer.pictures.append(picture)
        return answer

    async def _by_json(self, edit: Edit, delivery: Delivery, template_id: str | None) -> dict[str, Any]:
        words = _words(edit, delivery, template_id)
        body = words | words.pop("extra_body")
        if edit.template is not None:
            body |= _json_files(edit, delivery, template_id)
        path = "/v1/images/generations" if edit.template is None else "/v1/images/edits"
        response = await self.patiently("POST", path, json=body)
        if response.status_code != 200:
            raise refusal(response)
        return response.json()  # type: ignore[no-any-return]

    async def patiently(self, method: str, path: str, **call: Any) -> httpx.Response:
        """A call that comes back as often as it is told to. Raises RefusedError when there is no answer."""
        for _ in range(RETRIES):
            try:
                response = await self.plain.request(method, path, **call)
            except httpx.HTTPError as error:
                raise RefusedError(0, "", repr(error)) from error
            if response.status_code != 503 or "retry-after" not in response.headers:
                return response
            await asyncio.sleep(min(MAX_WAIT_SECONDS, float(response.headers["retry-after"])))
        return response


def refusal(response: httpx.Response) -> RefusedError:
    """What an answer in OpenAI's error envelope says."""
    try:
        error = response.json()["error"]
        return RefusedError(response.status_code, str(error["code"]), error["message"])
    except (ValueError, KeyError, TypeError):
        return RefusedError(response.status_code, "", f"no error envelope: {response.text[:200]!r}")


def _words(edit: Edit, delivery: Delivery, template_id: str | None = None) -> dict[str, Any]:
    """Arguments of the OpenAI client, but for pictures."""
    extra: dict[str, Any] = edit.fields | delivery.fields
    words: dict[str, Any] = {"prompt": edit.prompt, "n": edit.n, "output_format": delivery.output_format}
    if "size" in extra:
        words["size"] = extra.pop("size")
    if template_id is not None:
        extra["template_id"] = template_id
    return words | {"extra_body": extra}


def _files(edit: Edit, delivery: Delivery, template_id: str | None) -> dict[str, Any]:
    inside = edit.inside
    assert edit.template is not None
    assert inside is not None
    image = [] if template_id else ("image.png", template_file(edit.template), "image/png")
    mask = ("mask.png", transparent_mask(inside), "image/png")
    return {"image": image, "mask": mask}


def _json_files(edit: Edit, delivery: Delivery, template_id: str | None) -> dict[str, Any]:
    inside = edit.inside
    assert edit.template is not None
    assert inside is not None
    files: dict[str, Any] = {}
    if template_id is None:
        files["images"] = [{"image_url": _data_url(template_file(edit.template))}]
    if delivery.white_mask:
        return files | {"mask_image": base64.b64encode(white_mask(inside)).decode()}
    return files | {"mask": {"image_url": _data_url(transparent_mask(inside))}}


def _data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _answer(result: Any) -> Answer:
    """A whole answer, of either client."""
    body = result if isinstance(result, dict) else result.to_dict()
    return Answer(
        pictures=[base64.b64decode(item["b64_json"], validate=True) for item in body["data"]],
        seeds=[item["seed"] for item in body["data"]],
        facts=body["stencil"],
    )


def _take_event(event: dict[str, Any], answer: Answer, finals: list[tuple[int, bytes]]) -> None:
    picture = base64.b64decode(event["b64_json"], validate=True)
    if event["type"].endswith(".partial_image"):
        answer.partials.append((event["partial_image_index"], picture))
    else:
        answer.facts = event["stencil"]
        finals.append((event["stencil"]["seed"], picture))
