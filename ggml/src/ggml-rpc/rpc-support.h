#pragma once

#include "ggml-flash-attn-back-source.h"

// Whether the device of an RPC server runs a node, asked before anything is computed, for ggml-rpc.cpp behind its client.

// ---- client ----

// the node, its sources and what these are made of, which is as far as backends look; the rest is left out, and so is all that changes no answer
static std::vector<rpc_tensor> rpc_describe(const ggml_tensor * node) {
    std::vector<const ggml_tensor *> found = { node };
    const auto id                          = [&found](const ggml_tensor * tensor) -> uint64_t {
        const auto it = std::find(found.begin(), found.end(), tensor);
        return it == found.end() ? 0 : it - found.begin() + 1;
    };
    size_t end = 0;
    for (int depth = 0; depth < 2; ++depth) {
        const size_t begin = end;
        end                = found.size();
        for (size_t i = begin; i < end; ++i) {
            const ggml_tensor * tensor = found[i];
            for (int j = 0; j <= GGML_MAX_SRC; ++j) {
                const ggml_tensor * source = j < GGML_MAX_SRC ? tensor->src[j] : tensor->view_src;
                if (source && !id(source)) {
                    found.push_back(source);
                }
            }
        }
    }
    std::vector<rpc_tensor> tensors;
    for (const ggml_tensor * tensor : found) {
        rpc_tensor one = serialize_tensor(tensor);
        one.id         = tensors.size() + 1;
        one.buffer     = 0;
        one.data       = 0;
        one.flags      = 0;
        one.view_src   = tensor->view_src ? id(tensor->view_src) : 0;
        for (int j = 0; j < GGML_MAX_SRC; ++j) {
            one.src[j] = tensor->src[j] ? id(tensor->src[j]) : 0;
        }
        memset(one.name, 0, sizeof(one.name));
        tensors.push_back(one);
    }
    return tensors;
}

// what only patched servers run
static bool rpc_needs_patch(const ggml_tensor * op) {
    return op->op == GGML_OP_FLASH_ATTN_BACK || (op->op == GGML_OP_CROSS_ENTROPY_LOSS && op->src[1]->type == GGML_TYPE_I32) ||
        (op->op == GGML_OP_CROSS_ENTROPY_LOSS_BACK && op->src[2]->type == GGML_TYPE_I32);
}

// the answer for a device, which stays where it is; stock servers are taken to run all that stock ggml has, as stock clients do
static const rpc_support_rsp & rpc_ask(ggml_backend_dev_t dev, const ggml_tensor * op) {
    static std::mutex mutex;
    static std::unordered_map<std::string, rpc_support_rsp> answers;

    const auto * ctx = (const ggml_backend_rpc_device_context *) dev->context;
    std::string host;
    int port = 0;
    parse_endpoint(ctx->endpoint, host, port);
    rpc_server_info info;
    {
        std::lock_guard<std::mutex> lock(rpc_infos_mutex);
        info = rpc_infos[host + ":" + std::to_string(port)];
    }

    const bool patched                    = info.patch == RPC_PATCH_VERSION;
    const std::vector<rpc_tensor> tensors = patched ? rpc_describe(op) : std::vector<rpc_tensor>();
    const size_t size                     = sizeof(ctx->device) + tensors.size() * sizeof(rpc_tensor);
    std::shared_ptr<char> request(new char[size], std::default_delete<char[]>());
    memcpy(request.get(), &ctx->device, sizeof(ctx->device));
    memcpy(request.get() + sizeof(ctx->device), tensors.data(), size - sizeof(ctx->device));

    std::lock_guard<std::mutex> lock(mutex);
    const std::string key = ctx->endpoint + '\0' + (patched ? "" : rpc_needs_patch(op) ? "n"
                                                                                       : "y") +
        std::string(request.get(), size);
    const auto known = answers.find(key);
    if (known != answers.end()) {
        return known->second;
    }
    rpc_support_rsp & answer = answers[key];
    if (patched) {
#if RPC_PROTO_MAJOR_VERSION >= 6
        get_dispatcher(ctx->endpoint)->send(rpc_cmd(RPC_CMD_SUPPORT), request, size, &answer, sizeof(answer));
#else
        const bool status = send_rpc_cmd(get_socket(ctx->endpoint), rpc_cmd(RPC_CMD_SUPPORT), request.get(), size, &answer, sizeof(answer));
        RPC_STATUS_ASSERT(status);
#endif
        answer.path[sizeof(answer.path) - 1]     = 0;
        answer.reason[sizeof(answer.reason) - 1] = 0;
    } else if (rpc_needs_patch(op)) {
        const std::string theirs = info.patch ? "has version " + std::to_string(info.patch) + " of the patch" : "is not patched";
        snprintf(answer.reason, sizeof(answer.reason), "RPC server %s (protocol %s) %s, and version %d runs %s; build it from a tree with this patch",
            ctx->endpoint.c_str(), info.protocol.c_str(), theirs.c_str(), RPC_PATCH_VERSION, ggml_op_desc(op));
    } else {
        answer.supported = 1;
    }
    return answer;
}

static const char * rpc_refusal(ggml_backend_dev_t dev, const ggml_tensor * op) {
    const rpc_support_rsp & answer = rpc_ask(dev, op);
    return answer.supported ? nullptr : answer.reason;
}

static const char * rpc_path(ggml_backend_dev_t dev, const ggml_tensor * op) {
    const rpc_support_rsp & answer = rpc_ask(dev, op);
    return answer.path[0] ? answer.path : nullptr;
}

static const char * rpc_source() {
    return GGML_FLASH_ATTN_BACK_SOURCE;
}

static void * rpc_support_proc_address(const char * name) {
    if (strcmp(name, "ggml_backend_flash_attn_back_source") == 0) {
        return (void *) rpc_source;
    }
    if (strcmp(name, "ggml_backend_flash_attn_back_refusal") == 0) {
        return (void *) rpc_refusal;
    }
    if (strcmp(name, "ggml_backend_flash_attn_back_path") == 0) {
        return (void *) rpc_path;
    }
    return nullptr;
}

// ---- server ----

// what the device's backend says of a node of FLASH_ATTN_BACK or of its forward
static const char * rpc_device_says(ggml_backend_dev_t dev, const char * what, const ggml_tensor * op) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
    void * pointer         = reg ? ggml_backend_reg_get_proc_address(reg, what) : nullptr;
    using say              = const char * (*)(ggml_backend_dev_t dev, const ggml_tensor * op);
    return pointer ? ((say) pointer)(dev, op) : nullptr;
}

// why the device does not run a node, empty if it does
static std::string rpc_device_refusal(ggml_backend_dev_t dev, const ggml_tensor * op) {
    if (ggml_backend_dev_supports_op(dev, op)) {
        return "";
    }
    const bool ours     = op->op == GGML_OP_FLASH_ATTN_BACK;
    const char * reason = ours ? rpc_device_says(dev, "ggml_backend_flash_attn_back_refusal", op) : nullptr;
    return std::string(ggml_backend_dev_name(dev)) + " does not run " + ggml_op_desc(op) + (reason ? std::string(": ") + reason : " on these tensors");
}

// the node of a request, NULL if it is malformed
static ggml_tensor * rpc_build_node(ggml_context * ctx, const std::vector<rpc_tensor> & tensors) {
    std::vector<ggml_tensor *> built;
    for (const rpc_tensor & one : tensors) {
        if (one.type >= GGML_TYPE_COUNT || ggml_blck_size(ggml_type(one.type)) == 0 || one.op >= GGML_OP_COUNT) {
            return nullptr;
        }
        ggml_tensor * tensor = ggml_new_tensor_4d(ctx, ggml_type(one.type), one.ne[0], one.ne[1], one.ne[2], one.ne[3]);
        tensor->op           = ggml_op(one.op);
        tensor->view_offs    = one.view_offs;
        std::copy(one.nb, one.nb + GGML_MAX_DIMS, tensor->nb);
        memcpy(tensor->op_params, one.op_params, sizeof(tensor->op_params));
        built.push_back(tensor);
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
        for (int j = 0; j <= GGML_MAX_SRC; ++j) {
            const uint64_t id = j < GGML_MAX_SRC ? tensors[i].src[j] : tensors[i].view_src;
            if (id > built.size()) {
                return nullptr;
            }
            (j < GGML_MAX_SRC ? built[i]->src[j] : built[i]->view_src) = id ? built[id - 1] : nullptr;
        }
    }
    return built.empty() ? nullptr : built[0];
}

// answers RPC_CMD_SUPPORT; false where the connection is to be closed
static bool rpc_answer_support(const socket_ptr & sock, const std::vector<ggml_backend_t> & backends) {
    std::vector<uint8_t> input;
    uint32_t device;
    if (!recv_msg(sock, input) || input.size() < sizeof(device)) {
        return false;
    }
    memcpy(&device, input.data(), sizeof(device));
    std::vector<rpc_tensor> tensors((input.size() - sizeof(device)) / sizeof(rpc_tensor));
    memcpy(tensors.data(), input.data() + sizeof(device), tensors.size() * sizeof(rpc_tensor));
    if (device >= backends.size() || tensors.empty()) {
        return false;
    }
    ggml_context_ptr ctx(ggml_init({ tensors.size() * ggml_tensor_overhead(), nullptr, /*no_alloc =*/true }));
    const ggml_tensor * op = rpc_build_node(ctx.get(), tensors);
    if (!op) {
        GGML_LOG_ERROR("[%s] malformed node\n", __func__);
        return false;
    }
    ggml_backend_dev_t dev = ggml_backend_get_device(backends[device]);

    rpc_support_rsp response  = {};
    const std::string refusal = rpc_device_refusal(dev, op);
    const bool is_attention   = op->op == GGML_OP_FLASH_ATTN_BACK || op->op == GGML_OP_FLASH_ATTN_EXT;
    const char * path         = is_attention && refusal.empty() ? rpc_device_says(dev, "ggml_backend_flash_attn_back_path", op) : nullptr;
    response.supported        = refusal.empty();
    snprintf(response.path, sizeof(response.path), "%s", path ? path : "");
    snprintf(response.reason, sizeof(response.reason), "%s", refusal.c_str());
    return send_msg(sock, &response, sizeof(response));
}

// computes a graph, or leaves the reason why not in rpc_problem()
static bool rpc_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    ggml_backend_dev_t dev = ggml_backend_get_device(backend);
    for (int i = 0; i < graph->n_nodes; ++i) {
        const ggml_tensor * node = graph->nodes[i];
        const std::string reason = node && !ggml_op_is_empty(node->op) ? rpc_device_refusal(dev, node) : "";
        if (!reason.empty()) {
            rpc_problem() = reason;
            return false;
        }
    }
    const ggml_status status = ggml_backend_graph_compute(backend, graph);
    if (status != GGML_STATUS_SUCCESS) {
        rpc_problem() = std::string(ggml_backend_dev_name(dev)) + " did not compute the graph: " + ggml_status_to_string(status);
        return false;
    }
    return true;
}

// tells the client why the connection ends, and reads on until it has understood
static void rpc_refuse(const socket_ptr & sock) {
    char reason[RPC_REASON_SIZE] = {};
    snprintf(reason, sizeof(reason), "%s", rpc_problem().empty() ? "a malformed graph" : rpc_problem().c_str());
    GGML_LOG_ERROR("refused: %s\n", reason);
    rpc_problem().clear();
    if (!sock->send_data(&RPC_REFUSAL, sizeof(RPC_REFUSAL)) || !sock->send_data(reason, sizeof(reason))) {
        return;
    }
#if RPC_PROTO_MAJOR_VERSION >= 6
    sock->flush();
#endif
    std::vector<char> rest(1 << 16);
    while (sock->recv_data(rest.data(), rest.size())) {
    }
}
