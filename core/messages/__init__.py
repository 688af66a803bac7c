"""Every message between actors: one frozen msgspec Struct each, a file per receiver; arrays only as handles.

Messages travel as msgpack (ZeroMQ between API server and EngineCore, `core.ipc.ring` elsewhere on one host). The unions
in each file are what a receiver decodes. Times are seconds of CLOCK_MONOTONIC unless a name says otherwise.
"""
