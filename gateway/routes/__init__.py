"""The HTTP routes, one file for each purpose.

A route's decorator gets `described(..., right=...)` (`gateway/http/openapi.py`): what the route takes and gives, and who may
call it; its docstring is the summary in /openapi.json.  `build_app` (`gateway/http/app.py`) lists the files.  Fixed paths below
/admin/ come before `/admin/{command}`.  A route that generates has `Right.GENERATE` and calls `respond` or `generate`
(`generate.py`).  `ENDPOINTS` (`gateway/storage/batches/calls.py`) are those for batches; `peer_calls`
(`gateway/http/server.py`) are what a route has the other processes on the port do.  Tests compare the rights of all routes
(`test_rights.py`), and docs/reference/api.md.
"""
