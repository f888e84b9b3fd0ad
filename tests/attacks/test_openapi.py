"""Requests made from our own OpenAPI description, right and wrong: whatever comes, no answer is a 5xx."""

import logging
from collections import Counter

import pytest
from http_edge import Edge, png, text

logger = logging.getLogger(__name__)

PICTURES = [text(png(level, kind=kind)) for level, kind in [(0, "PNG"), (255, "PNG"), (90, "JPEG"), (90, "WEBP")]]
"""Some of what is sent as images are images, so that requests get as far as the judge."""


@pytest.mark.slow
@pytest.mark.parametrize("count", [140, pytest.param(20_000, marks=pytest.mark.full)])
def test_no_request_breaks_the_gateway(tmp_path, count):
    # imported here: it takes seconds, and every test process reads this file
    import schemathesis
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
    from schemathesis import GenerationMode
    from schemathesis.config import SchemathesisConfig

    edge = Edge(tmp_path, max_images=1_024)
    config = SchemathesisConfig()
    config.projects.override.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    schemathesis.openapi.format(
        "byte", st.sampled_from(PICTURES) | st.sampled_from(PICTURES) | st.binary(min_size=1).map(text)
    )
    schema = schemathesis.openapi.from_dict(edge.client.get("/openapi.json").json(), config=config)
    operations = [found.ok() for found in schema.get_all_operations()]
    num_posts = sum(operation.method == "post" for operation in operations)
    statuses: Counter = Counter()

    for operation in operations:
        cases = st.one_of(*[operation.as_strategy(generation_mode=mode) for mode in GenerationMode])

        @settings(
            max_examples=count // num_posts + 1,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases)
        def send(case):
            request = case.as_transport_kwargs(base_url="http://127.0.0.1")
            sent = {name: request.get(name) for name in ("json", "data", "params", "cookies")}
            headers = {name: value for name, value in dict(request["headers"]).items() if value is not None}
            content = sent.pop("data")
            if isinstance(content, str | bytes):
                sent["content"] = content
            answer = edge.client.request(request["method"], request["url"], headers=headers | edge.headers, **sent)
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, (request, answer.text)
            if answer.status_code != 200 and request["method"] != "HEAD":
                assert set(answer.json()["error"]) == {"code", "message", "type", "param", "fix"}

        send()
    logger.warning("answers by status: %s", dict(statuses))
    assert statuses.total() >= count and statuses[200] >= 10 and statuses[422] > 0, statuses
