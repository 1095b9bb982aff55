// Trains a model through libllama's optimizer API, or measures its perplexity, and says on stdout what happened: one JSON object a line.
//
//   start       what runs: parameters, tokens, windows; whether flash attention is on once the optimizer is set up
//   step        loss and seconds of a step
//   node        a node of the first step's graph that belongs to an attention: its layer, its backend, the layer's device,
//               and the operator's kernel path that runs it; none runs a forward that is ggml's own
//   ops         how many nodes of an op run on a backend in the first step
//   layers      where the layers of a device lie: its name, what the backend says of it, the layers, whether the output is there
//   state       bytes of the optimizer's state that a buffer type holds, with --nodes 1
//   memory      bytes of each buffer type after the first step, of a device over the run, and of this process at its peak
//   perplexity  of the model on the text
//
// The text is cut into windows of n_ctx tokens, the last one padded with end-of-text tokens, which do not count in the loss; neither do the
// first --prompt tokens of a window. Steps go through the windows in turn.
//
// --device takes names separated by commas, in whose order layers lie; --rpc HOST:PORT,... makes devices RPC0, RPC1, ... of ggml's RPC servers.
// A failure is a line on stderr that starts with error: and exit code 2; a file that was to be written is whole or not there.

#include "llama-context.h"
#include "llama-ext.h"
#include "llama-model.h"

#include "ggml-opt.h"
#include "gguf.h"

#ifdef _WIN32
#    ifndef NOMINMAX
#        define NOMINMAX
#    endif
#    include <windows.h>
// after the types that it needs
#    include <psapi.h>
#else
#    include <sys/resource.h>
#endif

#include <chrono>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

[[noreturn]] static void fail(const std::string & message) {
    fprintf(stderr, "error: %s\n", message.c_str());
    exit(2);
}

// what ggml ends a program with, from whatever thread: a failed assertion, an RPC server that is gone
static void end(const char * message) {
    fprintf(stderr, "error: %s\n", message);
    fflush(stderr);
    _Exit(2);
}

static void set_variable(const char * name, const std::string & value) {
#ifdef _WIN32
    _putenv_s(name, value.c_str());
#else
    setenv(name, value.c_str(), /*overwrite =*/1);
#endif
}

// bytes of memory that this process has held at most
static int64_t peak_of_process() {
#ifdef _WIN32
    PROCESS_MEMORY_COUNTERS counters = {};
    K32GetProcessMemoryInfo(GetCurrentProcess(), &counters, sizeof(counters));
    return counters.PeakWorkingSetSize;
#else
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return int64_t(usage.ru_maxrss) * 1024;
#endif
}

static std::vector<std::string> split(const std::string & list) {
    std::vector<std::string> items;
    std::stringstream stream(list);
    for (std::string item; std::getline(stream, item, ',');) {
        items.push_back(item);
    }
    return items;
}

// a file that takes its name when it is whole
static void rename_whole(const std::string & part, const std::string & path) {
    std::error_code error; // rename() replaces no file on Windows
    std::filesystem::rename(part, path, error);
    if (error) {
        fail("cannot write " + path + ": " + error.message());
    }
}

struct options {
    std::string model;
    std::string text;
    std::string save;
    std::string grads;
    std::string momenta; // of AdamW, after the step of the gradients
    std::string capture;
    std::string device;                 // "" = all, "none" = CPU only, or names of devices
    std::string rpc;                    // HOST:PORT of RPC servers
    std::string split_mode = "layer";   // none, layer, row, tensor
    std::string tensor_split;           // share of each device
    std::string optimizer = "adamw";   // or sgd
    std::string fa        = "on";      // off, on, auto
    std::string type_k    = "f32";
    std::string type_v    = "f32";
    std::string recompute; // what the backward pass forms again: elementwise or layers, see ggml-opt-memory.h
    std::string label;     // TOKEN:LABEL, the label of a token of every window, for tests

    int steps         = 0;
    int warmup        = 0; // steps in which the learning rate rises to lr
    int ctx           = 256;
    int batch         = 0; // tokens of an optimizer step, 0 = ctx
    int ubatch        = 0; // tokens of a graph, 0 = batch
    int seqs          = 1;
    int ngl           = -1;
    int threads       = 2;
    int tokens        = 0; // of the text, 0 = all
    int prompt        = 0; // tokens of a window that have no label
    int grads_step    = 1;
    int capture_layer = 0;
    int capture_step  = 1;
    int nodes         = 0;
    int perplexity    = 0;
    int kv_offload    = 1;
    int kv_unified    = 1;
    int embd_offload  = 1; // tokens are looked up on the first device
    int rpc_timeout   = 600; // seconds that an RPC server may take to answer

    double lr      = 1e-3;
    int64_t memory = 0; // bytes that a GPU is to have free, 0 = what it has

    options(int argc, char ** argv) {
        const std::map<std::string, std::string *> texts = {
            { "--model", &model },
            { "--text", &text },
            { "--save", &save },
            { "--grads", &grads },
            { "--momenta", &momenta },
            { "--capture", &capture },
            { "--device", &device },
            { "--rpc", &rpc },
            { "--split-mode", &split_mode },
            { "--tensor-split", &tensor_split },
            { "--optimizer", &optimizer },
            { "--fa", &fa },
            { "--type-k", &type_k },
            { "--type-v", &type_v },
            { "--recompute", &recompute },
            { "--label", &label },
        };
        const std::map<std::string, int *> numbers = {
            { "--steps", &steps },
            { "--warmup", &warmup },
            { "--ctx", &ctx },
            { "--batch", &batch },
            { "--ubatch", &ubatch },
            { "--seqs", &seqs },
            { "--ngl", &ngl },
            { "--threads", &threads },
            { "--tokens", &tokens },
            { "--prompt", &prompt },
            { "--grads-step", &grads_step },
            { "--capture-layer", &capture_layer },
            { "--capture-step", &capture_step },
            { "--nodes", &nodes },
            { "--perplexity", &perplexity },
            { "--kv-offload", &kv_offload },
            { "--kv-unified", &kv_unified },
            { "--embd-offload", &embd_offload },
            { "--rpc-timeout", &rpc_timeout },
        };
        for (int i = 1; i + 1 < argc; i += 2) {
            const std::string key   = argv[i];
            const std::string value = argv[i + 1];
            if (texts.count(key)) {
                *texts.at(key) = value;
            } else if (numbers.count(key)) {
                *numbers.at(key) = std::stoi(value);
            } else if (key == "--lr") {
                lr = std::stod(value);
            } else if (key == "--memory") {
                memory = std::stoll(value);
            } else {
                fail("unknown option " + key);
            }
        }
        if (model.empty() || text.empty() || argc % 2 == 0) {
            fail("--model FILE --text FILE and the other options come in pairs of --name value");
        }
        batch  = batch ? batch : ctx;
        ubatch = ubatch ? ubatch : batch;
    }

    // whether what the optimizer's steps read and keep is to be written
    bool wants_steps(int step) const {
        return step == grads_step && (!grads.empty() || !momenta.empty());
    }
};

static ggml_type type_of(const std::string & name) {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const char * known = ggml_type_name(ggml_type(i));
        if (known && name == known) {
            return ggml_type(i);
        }
    }
    fail("no type is called " + name);
}

// the layer in the name of a tensor or of the nearest one that it is made of, -1 if none has one
static int layer_of(const ggml_tensor * tensor) {
    static const std::regex suffix("-(\\d+)");
    std::cmatch found;
    if (std::regex_search(tensor->name, found, suffix)) {
        return std::stoi(found[1]);
    }
    for (const ggml_tensor * src : tensor->src) {
        const int layer = src ? layer_of(src) : -1;
        if (layer >= 0) {
            return layer;
        }
    }
    return -1;
}

// a GGUF file of contiguous copies of tensors
class gguf_file {
public:
    gguf_file() :
        ctx(ggml_init({ 4096 * ggml_tensor_overhead(), nullptr, true })),
        file(gguf_init_empty()) {}

    ~gguf_file() {
        gguf_free(file);
        ggml_free(ctx);
    }

    void add(const std::string & name, const ggml_tensor * tensor) {
        ggml_tensor * copy = ggml_new_tensor(ctx, tensor->type, GGML_MAX_DIMS, tensor->ne);
        ggml_set_name(copy, name.c_str());
        std::vector<char> span(ggml_nbytes(tensor));
        ggml_backend_tensor_get(tensor, span.data(), 0, span.size());
        data.emplace_back(ggml_nbytes(copy));
        copy->data = data.back().data();

        const bool whole   = ggml_is_contiguous_rows(tensor);
        const size_t piece = whole ? copy->nb[1] : copy->nb[0];
        const int64_t n    = whole ? 1 : copy->ne[0];
        char * to          = data.back().data();
        for (int64_t i3 = 0; i3 < copy->ne[3]; ++i3) {
            for (int64_t i2 = 0; i2 < copy->ne[2]; ++i2) {
                for (int64_t i1 = 0; i1 < copy->ne[1]; ++i1) {
                    for (int64_t i0 = 0; i0 < n; ++i0, to += piece) {
                        memcpy(to, span.data() + i3 * tensor->nb[3] + i2 * tensor->nb[2] + i1 * tensor->nb[1] + i0 * tensor->nb[0], piece);
                    }
                }
            }
        }
        gguf_add_tensor(file, copy);
    }

    void set(const std::string & key, float value) {
        gguf_set_val_f32(file, key.c_str(), value);
    }

    void set(const std::string & key, uint32_t value) {
        gguf_set_val_u32(file, key.c_str(), value);
    }

    void set(const std::string & key, const std::string & value) {
        gguf_set_val_str(file, key.c_str(), value.c_str());
    }

    void write(const std::string & path) {
        if (!gguf_write_to_file(file, (path + ".part").c_str(), /*only_meta =*/false)) {
            fail("cannot write " + path);
        }
        rename_whole(path + ".part", path);
    }

private:
    ggml_context * ctx;
    gguf_context * file;
    std::vector<std::vector<char>> data;
};

// what the scheduler's callback sees of a step
struct observer {
    const options & opt;
    llama_context * ctx = nullptr;
    int step            = 0;
    float loss          = NAN; // of the step before
    gguf_file grads;
    gguf_file momenta;
    std::map<std::pair<std::string, std::string>, int> ops;
    std::map<std::string, size_t> state; // bytes by buffer type

    bool wants(const ggml_tensor * node) const {
        if (node->op == GGML_OP_OPT_STEP_ADAMW || node->op == GGML_OP_OPT_STEP_SGD) {
            return opt.wants_steps(step);
        }
        return node->op == GGML_OP_FLASH_ATTN_BACK && step == opt.capture_step && !opt.capture.empty() &&
            layer_of(node->src[0]) == opt.capture_layer;
    }

    static const char * path_of(const ggml_tensor * node, ggml_backend_dev_t dev) {
        ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
        void * pointer         = ggml_backend_reg_get_proc_address(reg, "ggml_backend_flash_attn_back_path");
        using path_of          = const char * (*)(ggml_backend_dev_t dev, const ggml_tensor * node); // stock llama.cpp has no header for it
        const char * path      = pointer ? ((path_of) pointer)(dev, node) : nullptr;
        return path ? path : "none";
    }

    void place(ggml_tensor * node) {
        ggml_backend_t backend = ggml_backend_sched_get_tensor_backend(ctx->get_sched(), node);
        ggml_backend_dev_t dev = backend ? ggml_backend_get_device(backend) : nullptr;
        const std::string name = dev ? ggml_backend_dev_name(dev) : "none";
        ops[{ ggml_op_desc(node), name }]++;
        if (node->op == GGML_OP_OPT_STEP_ADAMW) {
            state[ggml_backend_buffer_name(node->src[2]->buffer)] += ggml_nbytes(node->src[2]) + ggml_nbytes(node->src[3]);
        }
        if (node->op == GGML_OP_FLASH_ATTN_EXT || node->op == GGML_OP_FLASH_ATTN_BACK) {
            const int layer     = layer_of(node->src[0]);
            const char * device = layer < 0 ? "" : ggml_backend_dev_name(ctx->get_model().dev_layer(layer));
            printf("{\"event\": \"node\", \"op\": \"%s\", \"layer\": %d, \"backend\": \"%s\", \"device\": \"%s\", ",
                ggml_op_name(node->op), layer, name.c_str(), device);
            printf("\"path\": \"%s\"}\n", dev ? path_of(node, dev) : "none");
        }
    }

    void capture(const ggml_tensor * node) const {
        // autodiff's o is not there for its values
        static const char * names[] = { "q", "k", "v", "mask", "sinks", nullptr, "d" };
        gguf_file file;
        for (int i = 0; i < 7; ++i) {
            if (node->src[i] && names[i]) {
                file.add(names[i], node->src[i]);
            }
        }
        float params[3];
        memcpy(params, node->op_params, sizeof(params));
        file.set("general.architecture", "flash_attn_back");
        file.set("flash_attn_back.version", 1u);
        file.set("flash_attn_back.scale", params[0]);
        file.set("flash_attn_back.max_bias", params[1]);
        file.set("flash_attn_back.logit_softcap", params[2]);
        file.set("flash_attn_back.source", "llama.cpp, step " + std::to_string(step));
        file.set("flash_attn_back.layer", std::to_string(opt.capture_layer));
        file.set("flash_attn_back.loss", std::to_string(loss) + " in the step before");
        file.write(opt.capture);
    }

    static bool callback(ggml_tensor * node, bool ask, void * data) {
        observer & self = *(observer *) data;
        if (ask) {
            if (self.step == 1 && self.opt.nodes) {
                self.place(node);
            }
            return self.wants(node);
        }
        if (node->op == GGML_OP_FLASH_ATTN_BACK) {
            self.capture(node);
            return true;
        }
        if (!self.opt.grads.empty()) {
            self.grads.add(node->src[0]->name, node->src[1]);
        }
        if (!self.opt.momenta.empty() && node->op == GGML_OP_OPT_STEP_ADAMW) {
            self.momenta.add(std::string("m.") + node->src[0]->name, node->src[2]);
            self.momenta.add(std::string("v.") + node->src[0]->name, node->src[3]);
        }
        return true;
    }
};

static std::vector<llama_token> tokenize(const llama_vocab * vocab, const options & opt) {
    std::ifstream file(opt.text, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    if (!file) {
        fail("cannot read " + opt.text);
    }
    std::vector<llama_token> tokens(text.str().size() + 2);
    const int n = llama_tokenize(vocab, text.str().data(), text.str().size(), tokens.data(), tokens.size(), true, false);
    tokens.resize(std::max(opt.tokens ? std::min(n, opt.tokens) : n, 0));
    if (tokens.size() < 2) {
        fail("two tokens of " + opt.text + " or more are needed, one to predict the other from");
    }
    return tokens;
}

static size_t free_memory(ggml_backend_dev_t dev) {
    size_t free, total;
    ggml_backend_dev_memory(dev, &free, &total);
    return free;
}

static void say_memory(llama_context * ctx, const std::map<ggml_backend_dev_t, size_t> & before, const std::map<ggml_backend_dev_t, size_t> & least) {
    for (const auto & [buft, sizes] : llama_get_memory_breakdown(ctx)) {
        printf("{\"event\": \"memory\", \"buffer\": \"%s\", \"model\": %zu, \"context\": %zu, \"compute\": %zu}\n",
            ggml_backend_buft_name(buft), sizes.model, sizes.context, sizes.compute);
    }
    for (const auto & [dev, bytes] : before) {
        printf("{\"event\": \"memory\", \"device\": \"%s\", \"peak\": %zu}\n", ggml_backend_dev_name(dev), bytes - least.at(dev));
    }
    printf("{\"event\": \"memory\", \"process\": %" PRId64 "}\n", peak_of_process());
}

static void say_layers(const llama_model * model) {
    std::vector<ggml_backend_dev_t> devices;
    std::map<ggml_backend_dev_t, std::string> layers;
    for (int i = 0; i < llama_model_n_layer(model); ++i) {
        ggml_backend_dev_t dev = model->dev_layer(i);
        if (!layers.count(dev)) {
            devices.push_back(dev);
        }
        layers[dev] += (layers[dev].empty() ? "" : ", ") + std::to_string(i);
    }
    if (!layers.count(model->dev_output())) {
        devices.push_back(model->dev_output());
    }
    for (ggml_backend_dev_t dev : devices) {
        printf("{\"event\": \"layers\", \"device\": \"%s\", \"description\": \"%s\", \"layers\": [%s], \"output\": %s}\n",
            ggml_backend_dev_name(dev), ggml_backend_dev_description(dev), layers[dev].c_str(), dev == model->dev_output() ? "true" : "false");
    }
}

static void train(llama_context * ctx, llama_model * model, const options & opt, const std::vector<llama_token> & tokens, observer & seen,
    const std::map<ggml_backend_dev_t, size_t> & before) {
    ggml_opt_optimizer_params rates = ggml_opt_get_default_optimizer_params(nullptr);
    llama_opt_params params         = {
        /*.n_ctx_train     =*/0,
        /*.param_filter    =*/llama_opt_param_filter_all,
        /*.param_filter_ud =*/nullptr,
        /*.get_opt_pars    =*/ggml_opt_get_constant_optimizer_params,
        /*.get_opt_pars_ud =*/&rates,
        /*.optimizer_type  =*/opt.optimizer == "sgd" ? GGML_OPT_OPTIMIZER_TYPE_SGD : GGML_OPT_OPTIMIZER_TYPE_ADAMW,
    };
    try {
        llama_opt_init(ctx, model, params);
    } catch (const std::exception & error) {
        fail(error.what());
    }
    say_layers(model);

    const int64_t n_ctx     = llama_n_ctx(ctx);
    const int64_t n_windows = (int64_t(tokens.size()) - 1 + n_ctx - 1) / n_ctx;
    const llama_token eos   = llama_vocab_eos(llama_model_get_vocab(model));
    printf("{\"event\": \"start\", \"flash_attn\": %s, \"kv_gradients\": %s, \"n_ctx\": %" PRId64 ", \"n_ubatch\": %u, \"parameters\": %" PRIu64
           ", \"layers\": %d, \"tokens\": %zu, \"windows\": %" PRId64 "}\n",
        ctx->get_cparams().flash_attn ? "true" : "false", ctx->get_cparams().training ? "true" : "false", n_ctx, llama_n_ubatch(ctx),
        llama_model_n_params(model), llama_model_n_layer(model), tokens.size(), n_windows);

    ggml_opt_dataset_t dataset = ggml_opt_dataset_init(GGML_TYPE_I32, GGML_TYPE_I32, n_ctx, n_ctx, /*ndata =*/1, /*ndata_shard =*/1);
    int32_t * inputs           = (int32_t *) ggml_opt_dataset_data(dataset)->data;
    int32_t * labels           = (int32_t *) ggml_opt_dataset_labels(dataset)->data;
    ggml_opt_result_t result   = ggml_opt_result_init();
    auto least                 = before;

    for (int step = 1; step <= opt.steps; ++step) {
        const size_t first = (step - 1) % n_windows * n_ctx;
        for (int64_t i = 0; i < n_ctx; ++i) {
            inputs[i] = first + i < tokens.size() ? tokens[first + i] : eos;
            labels[i] = i >= opt.prompt && first + i + 1 < tokens.size() ? tokens[first + i + 1] : -1;
        }
        if (!opt.label.empty()) {
            labels[std::stoll(opt.label)] = std::stoi(opt.label.substr(opt.label.find(':') + 1));
        }
        rates.adamw.alpha = rates.sgd.alpha = opt.lr * std::min(1.0, double(step) / std::max(opt.warmup, 1));

        seen.step        = step;
        const bool watch = (step == 1 && opt.nodes) || opt.wants_steps(step) ||
            (step == opt.capture_step && !opt.capture.empty());
        ggml_backend_sched_set_eval_callback(ctx->get_sched(), watch ? observer::callback : nullptr, &seen);

        const auto start = std::chrono::steady_clock::now();
        ggml_opt_result_reset(result);
        llama_opt_epoch(ctx, dataset, result, nullptr, /*idata_split =*/1, nullptr, nullptr);
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;

        int64_t n_rows;
        double loss;
        ggml_opt_result_ndata(result, &n_rows);
        ggml_opt_result_loss(result, &loss, nullptr);
        if (n_rows != n_ctx) {
            fail("step " + std::to_string(step) + " took " + std::to_string(n_rows) + " of " + std::to_string(n_ctx) + " tokens");
        }
        seen.loss = loss;
        printf("{\"event\": \"step\", \"step\": %d, \"loss\": %.9g, \"seconds\": %.6f}\n", step, loss, seconds.count());
        fflush(stdout);
        for (auto & [dev, bytes] : least) {
            bytes = std::min(bytes, free_memory(dev));
        }
        if (step == 1) {
            for (const auto & [where, n] : seen.ops) {
                printf("{\"event\": \"ops\", \"op\": \"%s\", \"backend\": \"%s\", \"nodes\": %d}\n", where.first.c_str(), where.second.c_str(), n);
            }
            for (const auto & [buffer, bytes] : seen.state) {
                printf("{\"event\": \"state\", \"buffer\": \"%s\", \"bytes\": %zu}\n", buffer.c_str(), bytes);
            }
        }
    }
    say_memory(ctx, before, least);
    ggml_opt_result_free(result);
    ggml_opt_dataset_free(dataset);

    if (!opt.grads.empty()) {
        seen.grads.write(opt.grads);
    }
    if (!opt.momenta.empty()) {
        seen.momenta.write(opt.momenta);
    }
    if (!opt.save.empty()) {
        llama_model_save_to_file(model, (opt.save + ".part").c_str());
        rename_whole(opt.save + ".part", opt.save);
    }
}

static void perplexity(llama_context * ctx, const llama_model * model, const std::vector<llama_token> & tokens) {
    const int n_ctx   = llama_n_ctx(ctx);
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_batch batch = llama_batch_init(n_ctx, 0, 1);
    double sum        = 0.0;
    int64_t n         = 0;
    for (size_t first = 0; first + 1 < tokens.size(); first += n_ctx) {
        batch.n_tokens = std::min<size_t>(n_ctx, tokens.size() - 1 - first);
        for (int i = 0; i < batch.n_tokens; ++i) {
            batch.token[i]     = tokens[first + i];
            batch.pos[i]       = i;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i]    = true;
        }
        llama_memory_clear(llama_get_memory(ctx), true);
        if (llama_decode(ctx, batch) != 0) {
            fail("llama_decode failed");
        }
        for (int i = 0; i < batch.n_tokens; ++i) {
            const float * logits = llama_get_logits_ith(ctx, i);
            double total         = 0.0;
            for (int t = 0; t < n_vocab; ++t) {
                total += std::exp(double(logits[t]) - logits[tokens[first + i + 1]]);
            }
            sum += std::log(total);
            ++n;
        }
    }
    llama_batch_free(batch);
    printf("{\"event\": \"perplexity\", \"perplexity\": %.9g, \"tokens\": %" PRId64 "}\n", std::exp(sum / n), n);
}

static void log_problems(ggml_log_level level, const char * text, void *) {
    static bool shown = false;
    if (level != GGML_LOG_LEVEL_CONT) {
        shown = level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR;
    }
    if (shown) {
        fputs(text, stderr);
    }
}

// makes devices of RPC servers
static void add_servers(const options & opt) {
    const std::vector<std::string> servers = split(opt.rpc);
    ggml_backend_reg_t rpc                 = servers.empty() ? nullptr : ggml_backend_reg_by_name("RPC");
    if (!servers.empty() && !rpc) {
        fail("these libraries have no RPC backend; build them with GGML_RPC=ON");
    }
    if (!getenv("GGML_RPC_TIMEOUT")) {
        set_variable("GGML_RPC_TIMEOUT", std::to_string(opt.rpc_timeout));
    }
    for (const std::string & server : servers) {
        using add_server       = ggml_backend_reg_t (*)(const char * endpoint);
        ggml_backend_reg_t reg = ((add_server) ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_add_server"))(server.c_str());
        if (!reg) {
            fail("the RPC server " + server + " has no devices");
        }
        ggml_backend_register(reg);
    }
}

// the devices that --device names, in its order
static std::vector<ggml_backend_dev_t> choose(const options & opt) {
    std::vector<ggml_backend_dev_t> devices;
    if (opt.device.empty()) {
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            if (ggml_backend_dev_type(ggml_backend_dev_get(i)) == GGML_BACKEND_DEVICE_TYPE_GPU) {
                devices.push_back(ggml_backend_dev_get(i));
            }
        }
    } else if (opt.device != "none") {
        for (const std::string & name : split(opt.device)) {
            ggml_backend_dev_t dev = ggml_backend_dev_by_name(name.c_str());
            if (!dev || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU) {
                fail("no device is called " + name);
            }
            devices.push_back(dev);
        }
    }
    return devices;
}

static llama_split_mode split_mode_of(const std::string & name) {
    static const std::map<std::string, llama_split_mode> modes = {
        { "none", LLAMA_SPLIT_MODE_NONE },
        { "layer", LLAMA_SPLIT_MODE_LAYER },
        { "row", LLAMA_SPLIT_MODE_ROW },
        { "tensor", LLAMA_SPLIT_MODE_TENSOR },
    };
    if (!modes.count(name)) {
        fail("no split mode is called " + name + "; none, layer, row and tensor are");
    }
    return modes.at(name);
}

int main(int argc, char ** argv) {
    ggml_set_abort_callback(end);
    const options opt(argc, argv);
    if (!opt.recompute.empty()) {
        set_variable("GGML_OPT_RECOMPUTE", opt.recompute);
    }
    llama_log_set(log_problems, nullptr);
    ggml_backend_load_all();
    llama_backend_init();
    add_servers(opt);

    std::map<ggml_backend_dev_t, size_t> before;
    std::vector<ggml_backend_buffer_t> ballast;
    std::vector<ggml_backend_dev_t> devices = choose(opt);
    for (ggml_backend_dev_t dev : devices) {
        const size_t free = free_memory(dev);
        if (opt.memory && free > size_t(opt.memory)) {
            ballast.push_back(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(dev), free - opt.memory));
        }
        before[dev] = free_memory(dev);
    }
    devices.push_back(nullptr);

    std::vector<float> shares(llama_max_devices(), 0.0f);
    const std::vector<std::string> given = split(opt.tensor_split);
    for (size_t i = 0; i < std::min(given.size(), shares.size()); ++i) {
        shares[i] = std::stof(given[i]);
    }

    llama_model_params model_params = llama_model_default_params();
    model_params.devices            = devices.data();
    model_params.n_gpu_layers       = opt.ngl;
    model_params.split_mode         = split_mode_of(opt.split_mode);
    model_params.tensor_split       = given.empty() ? nullptr : shares.data();
    model_params.load_mode          = LLAMA_LOAD_MODE_NONE; // writable weights

    // llama.cpp looks tokens up on the CPU, and the device would wait for their embeddings in every step
    const std::vector<llama_model_tensor_buft_override> overrides = {
        { "^token_embd\\.weight$", devices[0] ? ggml_backend_dev_buffer_type(devices[0]) : nullptr },
        { nullptr, nullptr },
    };
    if (devices[0] && opt.ngl != 0 && opt.embd_offload && model_params.split_mode != LLAMA_SPLIT_MODE_TENSOR) { // whose weights lie in a buffer of their own
        model_params.tensor_buft_overrides = overrides.data();
    }
    llama_model * model = llama_model_load_from_file(opt.model.c_str(), model_params);
    if (!model) {
        fail("cannot load " + opt.model);
    }

    observer seen{ opt };
    llama_context_params params = llama_context_default_params();
    params.n_ctx                = opt.ctx;
    params.n_batch              = opt.batch;
    params.n_ubatch             = opt.ubatch;
    params.n_seq_max            = opt.seqs;
    params.kv_unified           = opt.kv_unified;
    params.n_threads            = opt.threads;
    params.n_threads_batch      = opt.threads;
    params.flash_attn_type      = opt.fa == "on" ? LLAMA_FLASH_ATTN_TYPE_ENABLED : opt.fa == "off" ? LLAMA_FLASH_ATTN_TYPE_DISABLED
                                                                                                   : LLAMA_FLASH_ATTN_TYPE_AUTO;
    params.type_k               = type_of(opt.type_k);
    params.type_v               = type_of(opt.type_v);
    params.offload_kqv          = opt.kv_offload;
    llama_context * ctx         = llama_init_from_model(model, params);
    if (!ctx) {
        fail("cannot make a context");
    }
    seen.ctx = ctx;

    const std::vector<llama_token> tokens = tokenize(llama_model_get_vocab(model), opt);
    if (opt.steps) {
        train(ctx, model, opt, tokens, seen, before);
    }
    if (opt.perplexity) {
        perplexity(ctx, model, tokens);
    }

    llama_free(ctx);
    llama_model_free(model);
    for (ggml_backend_buffer_t buffer : ballast) {
        ggml_backend_buffer_free(buffer);
    }
    llama_backend_free();
    return 0;
}
