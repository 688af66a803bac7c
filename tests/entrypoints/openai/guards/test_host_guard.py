"""HostGuard: a foreign name that resolves to this machine gives no access to a server that listens on loopback."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from api_calls import assert_refused, post_edit
from fake_engine import FakeEngine
from real_server import running

from core.errors import ConfigError
from entrypoints import serve
from entrypoints.openai.app import ServerSettings, create_app
from entrypoints.openai.guards.host_guard import HostGuard
from entrypoints.serve import hosts_served
from entrypoints.serve_args import parse_options

ROUTES = (
    "/",
    "/status",
    "/playground/js/api.js",
    "/health",
    "/ready",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/v1/models",
    "/v1/engine/stats",
    "/nowhere",
)


def connect(engine: FakeEngine, host: str, *, api_keys: tuple[str, ...] = (), **settings: object) -> httpx.AsyncClient:
    """A client that sends `host` in its Host header, to a server on 127.0.0.1."""
    hosts = {"allowed_hosts": ("127.0.0.1",)} | settings
    app = create_app(engine, ServerSettings(api_keys=api_keys, max_upload_bytes=1000, playground=True, **hosts))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", headers={"host": host})


@pytest.mark.parametrize("api_keys", [(), ("k",)])
async def test_no_route_answers_for_a_foreign_host_name(engine: FakeEngine, api_keys: tuple[str, ...]) -> None:
    async with connect(engine, "evil.example:8000", api_keys=api_keys) as client:
        client.headers.update({"authorization": "Bearer k", "origin": "http://evil.example:8000"})
        for answer in [
            *[await client.get(route) for route in ROUTES],
            await client.head("/health"),
            await post_edit(client),
            await client.delete("/v1/templates/tmpl_0"),
        ]:
            if answer.request.method != "HEAD":
                assert_refused(answer, 403, "host_not_allowed", None)
                assert "--allowed-host evil.example" in answer.json()["error"]["message"]
            assert answer.status_code == 403
            assert answer.headers["x-request-id"]
    assert not engine.edits


async def test_preflight_requests_for_a_foreign_host_name_are_refused_too(engine: FakeEngine) -> None:
    preflight = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    async with connect(engine, "evil.example", allowed_origins=("*",)) as client:
        answer = await client.options("/v1/images/edits", headers=preflight)
        assert_refused(answer, 403, "host_not_allowed", None)
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LocalHost.:8000",
        "127.0.0.1",
        "127.0.0.1:1",
        "127.8.9.10:8000",
        "[::1]",
        "[::1]:8000",
        "[0:0:0:0:0:0:0:1]:8000",
        "[::ffff:127.0.0.1]:80",
        "pictures.example",
        "PICTURES.example.:443",
        "[2001:db8::1]:8000",
    ],
)
async def test_loopbacks_own_names_and_allowed_ones_are_the_servers(engine: FakeEngine, host: str) -> None:
    async with connect(engine, host, allowed_hosts=("pictures.example", "2001:db8::1")) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await post_edit(client)).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "",
        " ",
        ".",
        "evil.example",
        "localhost.evil.example",
        "evil-localhost",
        "notlocalhost",
        "x.localhost",
        "127.0.0.1.evil.example",
        "127.0.0.1@evil.example",
        "evil.example@127.0.0.1",
        "localhost:8000:8000",
        "localhost:port",
        "localhost/",
        "[::1",
        "::1",
        "[::1]x",
        "[evil.example]",
        "[127.0.0.1]",
        "0.0.0.0:8000",
        "10.0.0.1:8000",
        "pictures.example.evil.example",
        "sub.pictures.example",
        "löcalhost",
    ],
)
async def test_names_that_only_resemble_allowed_hosts_are_refused(engine: FakeEngine, host: str) -> None:
    async with connect(engine, "x", allowed_hosts=("pictures.example",)) as client:
        answer = await client.get("/health", headers=[(b"host", host.encode("latin-1"))])
        assert_refused(answer, 403, "host_not_allowed", None)


async def test_every_one_of_several_host_headers_counts(engine: FakeEngine) -> None:
    async with connect(engine, "x") as client:
        for hosts in (("localhost", "evil.example"), ("evil.example", "localhost")):
            answer = await client.get("/health", headers=[("host", host) for host in hosts])
            assert_refused(answer, 403, "host_not_allowed", None)


async def test_a_probe_without_a_host_is_no_browser() -> None:
    """HTTP/1.0 over a socket, as in some load balancers' health checks."""
    engine = FakeEngine()
    settings = ServerSettings(api_keys=(), max_upload_bytes=1000, allowed_hosts=("127.0.0.1",))
    server = serve.http_server(create_app(engine, settings))  # type: ignore[arg-type]
    with serve.bind("127.0.0.1", 0) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        statuses = []
        for head in (b"GET /health HTTP/1.0\r\n\r\n", b"GET /health HTTP/1.0\r\nhost: evil.example\r\n\r\n"):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(head)
            statuses.append((await reader.readline()).split()[1])
            writer.close()
        server.should_exit = True
        await task
    assert statuses == [b"200", b"403"]


async def test_without_a_list_every_host_name_is_served(engine: FakeEngine) -> None:
    async with connect(engine, "evil.example", allowed_hosts=()) as client:
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("flags", "hosts"),
    [
        ("", ("127.0.0.1",)),
        ("--host localhost", ("localhost",)),
        ("--host 127.0.0.9", ("127.0.0.9",)),
        ("--api-key k", ("127.0.0.1",)),
        ("--allowed-host a.example --allowed-host B.example.", ("127.0.0.1", "a.example", "b.example")),
        ("--allowed-host *", ()),
        ("--host 0.0.0.0", ()),
        ("--host 0.0.0.0 --allowed-host a.example", ("0.0.0.0", "a.example")),
        ("--host 0.0.0.0 --allowed-host *", ()),
    ],
)
def test_the_default_hosts_depend_on_the_address_listened_on(flags: str, hosts: tuple[str, ...]) -> None:
    options = parse_options(["--port", "0", *flags.split()])
    with serve.bind(options.host, options.port) as listener:
        assert hosts_served(options, listener) == hosts


def test_ipv6_loopback_is_loopback() -> None:
    options = parse_options(["--port", "0", "--host", "::1"])
    try:
        listener = serve.bind(options.host, options.port)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    with listener:
        assert hosts_served(options, listener) == ("::1",)


@pytest.mark.parametrize("text", ["", "http://a.example", "a.example:8000", "a b", "*.example", "a/b", "[::1]:80", "ü"])
def test_invalid_hosts_in_flags_are_refused_in_a_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options([f"--allowed-host={text}"])
    assert caught.value.code == 2
    assert "no host such as" in capsys.readouterr().err


def test_hosts_are_normalised_as_browsers_send_them() -> None:
    flags = ["--allowed-host=[2001:DB8:0::1]", "--allowed-host=::1", "--allowed-host=Pictures.Example."]
    assert parse_options(flags).allowed_hosts == ("2001:db8::1", "::1", "pictures.example")


async def test_scopes_other_than_http_pass() -> None:
    seen = []

    async def app(scope: object, receive: object, send: object) -> None:
        seen.append(scope)

    await HostGuard(app, ("a.example",))({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert seen == [{"type": "lifespan"}]


async def test_a_servers_own_address_works_over_a_socket() -> None:
    async with running(FakeEngine()) as (_, (host, port)), httpx.AsyncClient() as client:
        assert (await client.get(f"http://{host}:{port}/health")).status_code == 200
