"""The messages between processes: one frozen msgspec Struct each, in a file per receiver; arrays only as handles.

Messages travel as msgpack, by ZeroMQ between API server and EngineCore and by `core.ipc.ring` otherwise. The unions at
the end of each file are what a receiver decodes. Times are seconds of CLOCK_MONOTONIC unless a name says otherwise;
between API server and EngineCore they travel as ages of the engine, see `engine_birth.py`.
"""
