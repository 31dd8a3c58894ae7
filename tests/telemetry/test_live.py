"""The telemetry of a live cluster, by a real collector and a real Prometheus. Checks the parents of spans for requests
that are answered whole, streamed, cancelled and recovered; that metrics and logs arrive; that every series in
dashboards and rules exists."""

import concurrent.futures
import json
import re
import secrets

import queries
import pytest
from cluster import ROOT, running, wait_until
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

MODEL = "llama-f32-rope3"
CALLER = "b7ad6b7169203331"
BASELINE = ROOT / "proto" / "baseline.binpb"


@pytest.fixture(scope="module")
def cluster():
    with running() as cluster:
        yield cluster


def body(**more):
    return {"prompt": "hello", "max_tokens": 8, "ignore_eos": True, "seed": 1, "temperature": 0, **more}


def whole(cluster, path="/v1/completions", trace=None, sampled=True, **more):
    with cluster.post(path, body(**more), trace, sampled) as answer:
        return answer.status, json.loads(answer.read())


def new_trace():
    return secrets.token_hex(16)


def tree(cluster, trace, name, n_sequences=1):
    """Returns the request's span and its sequences' after all have arrived."""
    def arrived():
        requests, sequences = cluster.spans(trace, name), cluster.spans(trace, "sequence")
        return requests and len(sequences) == n_sequences and (requests[0], sequences)
    return wait_until(f"{name} of {trace} never arrives", arrived, lambda: f"{cluster.spans(trace)}\n{cluster.logs()}")


def check_parents(cluster, request, sequences, caller=CALLER):
    """router -> coordinator, and each of the coordinator's steps -> a pass of each worker that had a rank."""
    assert request.parent == caller and request.state == "vendor=1"
    assert request.sender["process.pid"] == cluster.pid("router")
    # The attributes that the chart sets for each pod.
    assert (request.sender["k8s.namespace.name"], request.sender["k8s.pod.name"]) == ("models", "router")
    for name in ("prepare", "place"):
        assert [span.parent for span in cluster.spans(request.trace, name)] == [request.id]
    for sequence in sequences:
        assert sequence.parent == request.id and sequence.state == "vendor=1"
        assert sequence.sender["process.pid"] == cluster.pid("coordinator")
        queue = [span for span in cluster.spans(request.trace, "queue") if span.parent == sequence.id]
        assert len(queue) == 1


def steps_of(cluster, sequence):
    """Returns a sequence's steps after all have arrived; a step without a result counts too."""
    n = sequence.attributes["lockstep.steps"]
    def linked():
        steps = [span for span in cluster.spans(name="step") if (sequence.trace, sequence.id) in span.links]
        return len(steps) >= n and steps
    return wait_until(f"{n} steps of {sequence} never arrive", linked)


def check_passes(cluster, step):
    def both():
        passes = [span for span in cluster.spans(name="pass") if span.parent == step.id]
        return len(passes) == 2 and passes
    passes = wait_until(f"the passes of {step} never arrive", both)
    assert sorted(span.attributes["lockstep.rank"] for span in passes) == [0, 1]
    assert {span.trace for span in passes} == {step.trace}
    senders = {span.sender["process.pid"] for span in passes}
    assert len(senders) == 2 and senders <= set(cluster.workers())


def test_one_that_is_answered_whole(cluster):
    trace = new_trace()
    status, answer = whole(cluster, trace=trace, n=2, top_p=0.5)
    assert status == 200
    request, sequences = tree(cluster, trace, f"text_completion {MODEL}", 2)
    check_parents(cluster, request, sequences)
    for sequence in sequences:
        steps = steps_of(cluster, sequence)
        check_passes(cluster, steps[0])
        check_passes(cluster, steps[-1])
    expect = {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "lockstep", "gen_ai.request.seed": 1,
        "gen_ai.request.max_tokens": 8, "gen_ai.request.top_p": 0.5, "gen_ai.request.temperature": 0.0,
        "gen_ai.request.choice.count": 2, "gen_ai.response.model": MODEL, "gen_ai.usage.output_tokens": 16,
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.response.finish_reasons": ["length", "length"], "lockstep.outcome": "ok",
    }
    assert {name: request.attributes.get(name) for name in expect} == expect
    assert answer["id"].endswith(request.attributes["gen_ai.response.id"])
    assert not any("messages" in name for name in request.attributes)


def test_a_chat_that_is_streamed(cluster):
    trace = new_trace()
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "stream": True}
    with cluster.post("/v1/chat/completions", chat, trace) as answer:
        text = answer.read().decode()
    # A checkpoint without a template answers no chat; the telemetry of both outcomes is checked.
    if answer.status == 200:
        assert text.rstrip().endswith("[DONE]")
        check_parents(cluster, *tree(cluster, trace, f"chat {MODEL}"))
    else:
        request, _ = tree(cluster, trace, f"chat {MODEL}", 0)
        assert request.failed and request.attributes["error.type"] == request.attributes["lockstep.outcome"]


def test_a_completion_that_is_streamed(cluster):
    trace = new_trace()
    with cluster.post("/v1/completions", body(stream=True), trace) as answer:
        assert answer.read().decode().rstrip().endswith("[DONE]")
    request, sequences = tree(cluster, trace, f"text_completion {MODEL}")
    check_parents(cluster, request, sequences)
    assert request.attributes["gen_ai.response.time_to_first_chunk"] > 0


def message_class(name):
    """Returns a message of the last release's protos, which the server supports as long as such clients exist."""
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(BASELINE.read_bytes()).file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def test_one_over_grpc(cluster):
    trace = new_trace()
    request = message_class("lockstep.v1.GenerateRequest")(model=MODEL, text="hello")
    request.sampling.max_tokens, request.sampling.ignore_eos, request.sampling.seed = 8, True, 1
    replies = cluster.generate_by_grpc(request.SerializeToString(), trace)
    assert len(replies) > 1
    request, sequences = tree(cluster, trace, f"text_completion {MODEL}")
    check_parents(cluster, request, sequences)
    steps = steps_of(cluster, sequences[0])
    check_passes(cluster, steps[-1])
    assert request.attributes["gen_ai.usage.output_tokens"] == 8


def test_one_that_is_not_sampled(cluster):
    """The steps have no spans at any role either: all roles respect the caller's flag."""
    trace, after = new_trace(), new_trace()
    assert whole(cluster, trace=trace, sampled=False)[0] == 200
    assert whole(cluster, trace=after)[0] == 200
    _, (sequence,) = tree(cluster, after, f"text_completion {MODEL}")
    steps_of(cluster, sequence)
    assert not cluster.spans(trace)
    assert all(link[0] != trace for step in cluster.spans(name="step") for link in step.links)


def test_one_that_is_cancelled(cluster):
    trace = new_trace()
    with cluster.post("/v1/completions", body(stream=True, max_tokens=1500), trace) as answer:
        answer.read(10)
    request, (sequence,) = tree(cluster, trace, f"text_completion {MODEL}")
    check_parents(cluster, request, [sequence])
    assert request.failed and request.attributes["error.type"] == "cancelled"
    assert sequence.attributes["lockstep.finish"] == "abort"


def test_one_that_is_recovered(cluster):
    """A worker is killed in mid-stream: the same sequence has steps of two epochs, and the client gets no error. The
    speed of a stream depends on the machine, so this is repeated until a stream has steps of both."""
    for n in range(3):
        trace = new_trace()
        with cluster.post("/v1/completions", body(stream=True, max_tokens=1500), trace) as answer:
            first = answer.read(10)
            replace_one(cluster, n)
            assert (first + answer.read()).decode().rstrip().endswith("[DONE]")
        request, (sequence,) = tree(cluster, trace, f"text_completion {MODEL}")
        epochs = {step.attributes["lockstep.epoch"] for step in steps_of(cluster, sequence)}
        if len(epochs) > 1:
            break
    assert len(epochs) > 1, "no stream was running when its worker was killed"
    check_parents(cluster, request, [sequence])
    assert request.attributes["lockstep.outcome"] == "ok" and request.attributes["gen_ai.usage.output_tokens"] == 1500
    recovery = wait_until("the recovery never arrives", lambda: cluster.spans(name="recovery"))[0]
    assert recovery.sender["process.pid"] == cluster.pid("coordinator")
    assert recovery.attributes["lockstep.replayed_tokens"] > 0
    logs = wait_until("the recovery's span has no log", lambda: [
        log for log in cluster.sink.logs if log["body"] == "the replica serves again" and log["span"] == recovery.id])
    assert logs[0]["trace"] == recovery.trace


def replace_one(cluster, n):
    """Kills the living worker with the latest pass span, and starts a new one, so that there is a spare again."""
    workers = cluster.workers()
    pids = [span.sender["process.pid"] for span in cluster.spans(name="pass")]
    victim = next(workers[pid] for pid in reversed(pids) if workers[pid].poll() is None)
    victim.kill()
    victim.wait()
    cluster.start_worker(3 + n)


def test_one_that_is_refused(cluster):
    """Sends more requests than the coordinator queues."""
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: whole(cluster, max_tokens=600)[0], range(16)))
    assert 429 in answers and 200 in answers, answers
    refused = wait_until("no refusal arrives", lambda: cluster.spans(lockstep__outcome="full"))
    assert all(span.failed and span.attributes["error.type"] == "full" for span in refused)


def test_logs_are_sent_with_their_request(cluster):
    trace = new_trace()
    assert whole(cluster, trace=trace)[0] == 200
    request, _ = tree(cluster, trace, f"text_completion {MODEL}")
    log = wait_until("its log never arrives", lambda: [log for log in cluster.sink.logs if log["trace"] == trace])[0]
    assert (log["body"], log["span"], log["scope"]) == ("request", request.id, "router::front::recorder")
    senders = {log["sender"]["process.pid"] for log in cluster.sink.logs}
    assert {cluster.pid("router"), cluster.pid("coordinator")} <= senders
    assert len({log["sender"]["service.instance.id"] for log in cluster.sink.logs}) == len(senders)


def test_metrics_are_sent_as_the_pages_have_them(cluster):
    names = {"lockstep:steps_total", "vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:cache_config_info",
             "gen_ai.server.request.duration", "gen_ai.server.time_to_first_token", "gen_ai.client.token.usage",
             "gen_ai.server.time_per_output_token", "lockstep:otlp_sent_total"}
    wait_until("not all metrics arrive", lambda: names <= {name for name, _, _ in cluster.sink.metrics})
    labels = {"gen_ai__operation__name": "text_completion", "gen_ai__response__model": MODEL}
    assert cluster.sink.total("gen_ai.server.request.duration", **labels) >= 5
    # The collector ran all the time, so nothing was dropped.
    assert cluster.sink.total("lockstep:otlp_dropped_total") == 0
    cache = [dict(of) for (name, _, of), is_so in cluster.sink.metrics.items()
             if name == "vllm:cache_config_info" and is_so == 1]
    assert len(cache) == 1 and cache[0]["block_size"] == "16" and int(cache[0]["num_gpu_blocks"]) > 0


def test_prometheus_has_every_metric_that_is_queried(cluster):
    """Sends the queries of dashboards and rules, unchanged, to a Prometheus that scrapes the pages."""
    # At least coordinator and router are up; killed workers have no page.
    wait_until("Prometheus reads fewer than two pages", lambda: len(cluster.query("up == 1")[1]) >= 2, cluster.logs)
    # Roles and clients use no certificates from files here.
    names = set(queries.names()) - {"lockstep:certificate_expiry_timestamp_seconds"}
    assert len(names) > 30
    def missing():
        return {name for name in names if not cluster.query(f"last_over_time({name}[10m])")[1]}
    wait_until("Prometheus lacks metrics", lambda: not missing(), lambda: f"{missing()}")
    for where, expression in queries.expressions():
        status, _ = cluster.query(expression)
        assert status == "success", f"{where}: {expression}"


def test_metrics_for_autoscalers_exist(cluster):
    """Autoscalers and the Gateway API inference extension read these by name and label."""
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"):
        found = cluster.query(f"vllm:{name}")[1]
        assert len(found) == 1 and re.fullmatch(r"[0-9.e-]+", found[0]["value"][1]), name
    (cache,) = cluster.query("vllm:cache_config_info == 1")[1]
    assert {"block_size", "num_gpu_blocks", "cache_dtype"} <= set(cache["metric"])
