#pragma once

// Sockets of the RPC backend that notice a peer that is gone or silent, and words for what went wrong, for transport.cpp.

#include "transport.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>

#ifndef MSG_NOSIGNAL // a lost connection is an error, not a signal that ends the program
#define MSG_NOSIGNAL 0
#endif

static thread_local int rpc_errno; // of the last send or recv, 0: the peer closed the connection

static void rpc_note_result(bool failed) {
#ifdef _WIN32
    rpc_errno = failed ? WSAGetLastError() : 0;
#else
    rpc_errno = failed ? errno : 0;
#endif
}

// seconds that a client waits for an answer, or for a server to take what it sends; 0: as long as the server's machine is there
static int rpc_timeout() {
    const char * seconds = std::getenv("GGML_RPC_TIMEOUT");
    return seconds ? atoi(seconds) : 0;
}

// a machine that vanishes is noticed after two minutes
template <typename FD> static void rpc_keep_alive(FD fd) {
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, (const char *) &on, sizeof(on));
#ifdef SO_NOSIGPIPE
    setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, (const char *) &on, sizeof(on));
#endif
#ifdef __linux__
    const int idle     = 60;
    const int interval = 10;
    const int probes   = 6;
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
#endif
}

template <typename FD> static void rpc_limit_waiting(FD fd) {
    const int seconds = rpc_timeout();
    if (seconds <= 0) {
        return;
    }
#ifdef _WIN32
    const DWORD limit = seconds * 1000;
#else
    const timeval limit = { seconds, 0 };
#endif
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, (const char *) &limit, sizeof(limit));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, (const char *) &limit, sizeof(limit));
}

// says of a client's socket what a failed send or recv means
static void rpc_note_failure(const std::string & server) {
    if (server.empty()) {
        return;
    }
#ifdef _WIN32
    const bool late = rpc_errno == WSAETIMEDOUT;
#else
    const bool late = rpc_errno == EAGAIN || rpc_errno == EWOULDBLOCK;
#endif
    if (late) {
        rpc_problem() = "RPC server " + server + ": no answer within " + std::to_string(rpc_timeout()) + " s (GGML_RPC_TIMEOUT)";
    } else {
        rpc_problem() = "RPC server " + server + ": the connection was lost" + (rpc_errno ? std::string(": ") + strerror(rpc_errno) : "");
    }
}
