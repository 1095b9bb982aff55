// What a training holds at a time, in ggml-opt.cpp, which includes this behind its structs: the order of its graphs'
// nodes, and results of the forward pass that are formed again for the backward pass.
//
// GGML_OPT_RECOMPUTE=elementwise forms again what is cheap: norms, factors and activation functions. =layers keeps
// what goes from one layer to the next, and forms the rest of a layer again right before its gradients. Losses,
// gradients and weights are the same bits, as copies of the nodes compute what the nodes have computed. Unset or empty:
// nothing.

#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>

enum ggml_opt_recompute {
    GGML_OPT_RECOMPUTE_NONE,
    GGML_OPT_RECOMPUTE_ELEMENTWISE,
    GGML_OPT_RECOMPUTE_LAYERS,
};

static enum ggml_opt_recompute ggml_opt_recompute_wanted() {
    const char * env        = getenv("GGML_OPT_RECOMPUTE");
    const std::string value = env ? env : "";
    if (value.empty()) {
        return GGML_OPT_RECOMPUTE_NONE;
    }
    if (value == "elementwise") {
        return GGML_OPT_RECOMPUTE_ELEMENTWISE;
    }
    if (value != "layers") {
        GGML_ABORT("GGML_OPT_RECOMPUTE=%s: must be elementwise, layers or empty", env);
    }
    return GGML_OPT_RECOMPUTE_LAYERS;
}

static bool ggml_opt_is_view(const ggml_tensor * t) {
    return t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE;
}

static bool ggml_opt_is_elementwise(const ggml_tensor * t) {
    return t->op == GGML_OP_NORM || t->op == GGML_OP_RMS_NORM || t->op == GGML_OP_MUL || t->op == GGML_OP_UNARY ||
        t->op == GGML_OP_GLU;
}

static ggml_tensor * ggml_opt_root(ggml_tensor * t) {
    return t->view_src ? t->view_src : t;
}

// The nodes [0, n) of the forward pass of a graph that has its backward pass behind them.
struct ggml_opt_forward {
    ggml_context * ctx;
    ggml_cgraph * graph;
    int n;
    std::unordered_map<const ggml_tensor *, int> index;
    std::vector<size_t> saved; // bytes that the backward pass reads
    std::vector<int> last;     // node of the forward pass that reads it last, -1: none
    std::vector<bool> kept;    // not to be formed again
    std::vector<int> segment;  // nodes of different ones are not formed again together
    std::unordered_map<const ggml_tensor *, ggml_tensor *> copies;
    std::vector<ggml_tensor *> order; // of the backward pass

    ggml_opt_forward(ggml_context * ctx, ggml_cgraph * graph, int n) :
        ctx(ctx),
        graph(graph),
        n(n),
        saved(n),
        last(n, -1),
        kept(n),
        segment(n) {
        for (int i = 0; i < n; ++i) {
            index[graph->nodes[i]] = i;
        }
        for (int i = 0; i < graph->n_nodes; ++i) {
            for (ggml_tensor * src : graph->nodes[i]->src) {
                const int j = src ? find(ggml_opt_root(src)) : -1;
                if (j < 0) {
                    continue;
                }
                if (i < n) {
                    last[j] = i;
                } else {
                    saved[j] = ggml_nbytes(graph->nodes[j]);
                }
            }
        }
    }

    // whether there is anything to form again
    bool counts(int i) const {
        return graph->nodes[i]->op != GGML_OP_NONE && ggml_graph_get_grad(graph, graph->nodes[i]);
    }

    int find(const ggml_tensor * t) const {
        const auto found = index.find(t);
        return found == index.end() ? -1 : found->second;
    }

    // Cuts the forward pass where one result at most is needed behind the cut, so that what is kept, the results at the
    // cuts and one segment, is least. What has no gradient does not count, it is there anyway.
    void cut() {
        struct place {
            int end;         // of the nodes before it
            size_t crossing; // bytes
        };
        std::vector<place> places;
        std::vector<int> open;
        for (int i = 0; i < n; ++i) {
            open.erase(std::remove_if(open.begin(), open.end(), [&](int j) { return last[j] <= i; }), open.end());
            if (last[i] > i && counts(i)) {
                open.push_back(i);
            }
            if (open.size() <= 1) {
                places.push_back({ i + 1, open.empty() ? 0 : ggml_nbytes(graph->nodes[open[0]]) });
            }
        }

        std::vector<size_t> bytes_to(n + 1); // that count, of the nodes before one
        for (int i = 0; i < n; ++i) {
            bytes_to[i + 1] = bytes_to[i] + (counts(i) ? saved[i] : 0);
        }
        size_t least = SIZE_MAX;
        for (size_t parts = 1; parts <= places.size(); ++parts) {
            std::vector<int> ends;
            size_t held = 0, largest = 0;
            int begin = 0;
            for (const place & p : places) {
                const size_t bytes = bytes_to[p.end] - bytes_to[begin];
                if (bytes >= bytes_to[n] / parts) {
                    ends.push_back(p.end);
                    begin = p.end;
                    held += p.crossing;
                    largest = std::max(largest, bytes);
                }
            }
            largest = std::max(largest, bytes_to[n] - bytes_to[begin]);
            if (held + largest < least) {
                least = held + largest;
                for (int i = 0, s = 0; i < n; ++i) {
                    s += s < int(ends.size()) && i == ends[s];
                    segment[i] = s;
                }
            }
        }
    }

    // Whether a node is cheap to form again from what is there anyway.
    bool is_cheap(int i) const {
        const ggml_tensor * t = graph->nodes[i];
        const auto is_at_hand = [&](ggml_tensor * src) {
            const int j = src ? find(ggml_opt_root(src)) : -1;
            return j < 0 || saved[j] > 0 || !kept[j];
        };
        return ggml_opt_is_view(t) ||
            (ggml_opt_is_elementwise(t) && std::all_of(t->src, t->src + GGML_MAX_SRC, is_at_hand));
    }

    // decides what is kept
    void decide(enum ggml_opt_recompute recompute) {
        const bool layers = recompute == GGML_OPT_RECOMPUTE_LAYERS;
        if (layers) {
            cut();
        }
        for (int i = 0; i < n; ++i) {
            const ggml_tensor * t = graph->nodes[i];
            const bool writes     = t->view_src && !ggml_opt_is_view(t); // into what may have changed since
            // the last segment comes first in the backward pass, so that it is still there
            kept[i] = kept[i] || (layers ? segment[i] == segment[n - 1] : !is_cheap(i)) || writes || !counts(i) ||
                (t->flags & (GGML_TENSOR_FLAG_INPUT | GGML_TENSOR_FLAG_OUTPUT | GGML_TENSOR_FLAG_LOSS));
            for (const ggml_tensor * src : t->src) {
                const int j = src ? find(src) : -1;
                if (j >= 0 && segment[j] != segment[i]) {
                    kept[j] = true;
                }
            }
        }
        // a view is kept with what it shows, and the other way round
        for (int i = 0; i < n; ++i) {
            const int root = find(ggml_opt_root(graph->nodes[i]));
            if (kept[i] && root >= 0) {
                kept[root] = true;
            }
        }
        for (int i = 0; i < n; ++i) {
            const int root = find(ggml_opt_root(graph->nodes[i]));
            kept[i]        = kept[i] || root < 0 || kept[root];
        }
    }

    // what stands for t in the backward pass: t, or a copy, in front of which stand those of its sources
    ggml_tensor * again(ggml_tensor * t) {
        const int i = t ? find(t) : -1;
        if (i < 0 || kept[i]) {
            return t;
        }
        const auto found = copies.find(t);
        if (found != copies.end()) {
            return found->second;
        }
        ggml_tensor * src[GGML_MAX_SRC];
        std::transform(t->src, t->src + GGML_MAX_SRC, src, [&](ggml_tensor * s) { return again(s); });

        ggml_tensor * copy = ggml_new_tensor(ctx, t->type, GGML_MAX_DIMS, t->ne);
        copy->op           = t->op;
        copy->view_src     = again(t->view_src);
        copy->view_offs    = t->view_offs;
        std::copy(t->nb, t->nb + GGML_MAX_DIMS, copy->nb);
        std::copy(src, src + GGML_MAX_SRC, copy->src);
        memcpy(copy->op_params, t->op_params, sizeof(copy->op_params));
        ggml_format_name(copy, "%s (again)", t->name);

        ggml_build_forward_expand(graph, copy); // in front of which its place is found below
        order.push_back(copy);
        return copies[t] = copy;
    }

    int & uses(const ggml_tensor * t) {
        return graph->use_counts[ggml_hash_find(&graph->visited_hash_set, t)];
    }

    void rebuild() {
        const std::vector<ggml_tensor *> backward(graph->nodes + n, graph->nodes + graph->n_nodes);
        for (ggml_tensor * node : backward) {
            for (ggml_tensor *& src : node->src) {
                ggml_tensor * now = again(src);
                if (now != src) {
                    --uses(src);
                    ++uses(now);
                    src = now;
                }
            }
            node->view_src = again(node->view_src);
            order.push_back(node);
        }
        std::copy(order.begin(), order.end(), graph->nodes + n);
        graph->n_nodes = n + order.size();
    }
};

static void ggml_opt_recompute_forward(ggml_opt_context_t opt_ctx) {
    const enum ggml_opt_recompute recompute = ggml_opt_recompute_wanted();
    if (recompute != GGML_OPT_RECOMPUTE_NONE) {
        ggml_opt_forward forward(opt_ctx->ctx_compute, opt_ctx->gb_grad, opt_ctx->gf->n_nodes);
        forward.decide(recompute);
        forward.rebuild();
    }
}

// Puts each of the optimizer's steps, the nodes of gb_opt behind those of gb_grad, right behind the last node that reads
// the parameter or forms the gradient, which need not wait for the end of the backward pass then.
static void ggml_opt_steps_first(ggml_opt_context_t opt_ctx) {
    ggml_cgraph * graph = opt_ctx->gb_opt;
    const int n         = opt_ctx->gb_grad->n_nodes;

    std::unordered_map<const ggml_tensor *, int> last; // node of gb_grad that writes or reads it
    for (int i = 0; i < n; ++i) {
        last[ggml_opt_root(graph->nodes[i])] = i;
        for (ggml_tensor * src : graph->nodes[i]->src) {
            if (src) {
                last[ggml_opt_root(src)] = i;
            }
        }
    }
    std::vector<std::vector<ggml_tensor *>> behind(n);
    for (int i = n; i < graph->n_nodes; ++i) {
        ggml_tensor * node = graph->nodes[i];
        int place          = 0;
        for (ggml_tensor * src : node->src) {
            const auto found = src ? last.find(ggml_opt_root(src)) : last.end();
            place            = found == last.end() ? place : std::max(place, found->second);
        }
        behind[place].push_back(node);
        last[ggml_opt_root(node)] = place;
    }
    std::vector<ggml_tensor *> order;
    for (int i = 0; i < n; ++i) {
        order.push_back(graph->nodes[i]);
        order.insert(order.end(), behind[i].begin(), behind[i].end());
    }
    std::copy(order.begin(), order.end(), graph->nodes);
}
