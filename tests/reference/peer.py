"""llama.cpp, through the C API that `llama-cpp-python` binds: logits of every position of a log, and its quantizer.

Independent of Lockstep and of the comparison.
"""

import ctypes

import llama_cpp as c
import numpy as np

F32, F16 = 0, 1
FLASH_AUTO, FLASH_OFF, FLASH_ON = -1, 0, 1
WARNING = 3


@c.llama_log_callback
def _print_log(level, text, _):
    if level >= WARNING and level != 5:
        print(text.decode("utf-8", "replace"), end="")


def start_llama_cpp():
    c.llama_backend_init()
    c.llama_log_set(_print_log, ctypes.c_void_p(0))


class Model:
    """A GGUF and one context of `n_ctx` positions."""

    def __init__(self, path, n_ctx, kv=F16, flash=FLASH_AUTO, threads=2, chunk=512):
        params = c.llama_model_default_params()
        params.n_gpu_layers = 0
        # Without copies of the weights in a processor's own form: those for AMX end the process.
        params.use_extra_bufts = False
        self.model = c.llama_model_load_from_file(str(path).encode(), params)
        assert self.model, f"llama.cpp does not load {path}"
        self.vocab = c.llama_model_get_vocab(self.model)
        self.n_vocab = c.llama_vocab_n_tokens(self.vocab)
        self.chunk = min(chunk, n_ctx)
        params = c.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, self.chunk, self.chunk
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = kv
        params.flash_attn_type = flash
        params.offload_kqv = params.op_offload = False
        self.context = c.llama_init_from_model(self.model, params)
        assert self.context, f"llama.cpp makes no context for {path}"
        self.batch = c.llama_batch_init(self.chunk, 0, 1)

    def close(self):
        c.llama_batch_free(self.batch)
        c.llama_free(self.context)
        c.llama_model_free(self.model)

    def tokenize(self, text):
        data = text.encode()
        ids = (c.llama_token * (len(data) + 8))()
        n = c.llama_tokenize(self.vocab, data, len(data), ids, len(ids), False, False)
        assert n >= 0
        return list(ids[:n])

    def rows(self, log):
        """Yields the logits of the next positions, [at most `chunk`, n_vocab], until the log's end."""
        c.llama_memory_clear(c.llama_get_memory(self.context), True)
        for start in range(0, len(log), self.chunk):
            tokens = log[start:start + self.chunk]
            self.batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                self.batch.token[i], self.batch.pos[i] = token, start + i
                self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, 0
                self.batch.logits[i] = True
            code = c.llama_decode(self.context, self.batch)
            assert code == 0, f"llama_decode returns {code}"
            rows = c.llama_get_logits(self.context)
            yield np.ctypeslib.as_array(rows, (len(tokens) * self.n_vocab,)).reshape(-1, self.n_vocab).copy()


def quantize(source, to, ftype, **more):
    """Quantizes as `llama-quantize` does. `ftype` is one of `llama_cpp.LLAMA_FTYPE_*`."""
    params = c.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = ftype, 1, True
    for name, value in more.items():
        setattr(params, name, value)
    code = c.llama_model_quantize(str(source).encode(), str(to).encode(), ctypes.byref(params))
    assert code == 0, f"{source}: llama.cpp's quantizer returns {code}"


def version():
    return {"llama-cpp-python": c.__version__}
