#pragma once

// What a patched client and a patched server say to each other beyond ggml's RPC protocol, for ggml-rpc.cpp. A stock client or server ignores the
// byte of HELLO's answer that stands for the patch, and is sent nothing else of this.

// of the operator's node and of the messages below; no answer of a stock server has it
static const uint8_t RPC_PATCH_VERSION = 1;

// a command: whether the device runs a node; the request is device and tensors, the answer an rpc_support_rsp
static const uint8_t RPC_CMD_SUPPORT = 200;

// in place of an answer's size: the server refuses to go on, and a reason of RPC_REASON_SIZE bytes follows
static const uint64_t RPC_REFUSAL   = UINT64_MAX;
static const size_t RPC_REASON_SIZE = 256;

#pragma pack(push, 1)

struct rpc_support_rsp {
    uint8_t supported;
    char path[31]; // the operator's kernel path, empty for other nodes
    char reason[RPC_REASON_SIZE];
};

#pragma pack(pop)

#undef RPC_STATUS_ASSERT
#define RPC_STATUS_ASSERT(x) \
    if (!(x)) \
    GGML_ABORT("%s", rpc_problem().empty() ? "an RPC server's answer is malformed" : rpc_problem().c_str())

static std::string rpc_version(int major, int minor, int patch) {
    return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

// what servers said of themselves, by host:port
struct rpc_server_info {
    uint8_t patch;
    std::string protocol;
};

static std::mutex rpc_infos_mutex;
static std::unordered_map<std::string, rpc_server_info> rpc_infos;

// a server's greeting; says so where it speaks another protocol
static void rpc_greeted(const socket_ptr & sock, const rpc_msg_hello_rsp & response) {
    const std::string theirs = rpc_version(response.major, response.minor, response.patch);
    if (response.major != RPC_PROTO_MAJOR_VERSION || response.minor > RPC_PROTO_MINOR_VERSION) {
        GGML_LOG_ERROR("RPC server %s speaks protocol %s, this client %s: build both from the same tree\n", sock->peer.c_str(), theirs.c_str(),
            rpc_version(RPC_PROTO_MAJOR_VERSION, RPC_PROTO_MINOR_VERSION, RPC_PROTO_PATCH_VERSION).c_str());
    }
    std::lock_guard<std::mutex> lock(rpc_infos_mutex);
    rpc_infos[sock->peer] = { response.padding, theirs };
}

// the reason that follows RPC_REFUSAL
static void rpc_read_refusal(const socket_ptr & sock) {
    char reason[RPC_REASON_SIZE] = {};
    if (sock->recv_data(reason, sizeof(reason))) {
        reason[sizeof(reason) - 1] = 0;
        rpc_problem()              = "RPC server " + sock->peer + ": " + reason;
    }
}
