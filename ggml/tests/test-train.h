// The kernels of a training step in test-backend-ops: included there behind test_cross_entropy_loss_back. Shapes and index patterns that upstream's
// cases lack: one element with thousands of repeats, rows that are taken often, in a row, or not at all.

struct test_get_rows_back_often : public test_get_rows_back {
    const int often; // percent of the indices that name one row

    std::string vars() override {
        return test_get_rows_back::vars() + ",often=" + std::to_string(often);
    }

    test_get_rows_back_often(int n, int m, int r, int often) :
        test_get_rows_back(GGML_TYPE_F32, n, m, r),
        often(often) {}

    void initialize_tensors(ggml_context * ctx) override {
        std::mt19937 rng(n + m + r + often);
        for (ggml_tensor * t = ggml_get_first_tensor(ctx); t != nullptr; t = ggml_get_next_tensor(ctx, t)) {
            if (t->type != GGML_TYPE_I32) {
                init_tensor_uniform(t);
                continue;
            }
            std::vector<int32_t> rows(r);
            for (int32_t & row : rows) {
                row = (int) (rng() % 100) < often ? m / 2 : rng() % m;
            }
            ggml_backend_tensor_set(t, rows.data(), 0, rows.size() * sizeof(int32_t));
        }
    }
};

// labels of the classes of rows, of which some do not count: percent of them, or all; rows may be a chunk of a batch of more
struct test_cross_entropy_loss_ids : public test_case {
    const std::array<int64_t, 4> ne;
    const int ignored;
    const bool back;
    const int64_t others; // rows of the batch that are not these

    std::string vars() override {
        return VARS_TO_STR3(ne, ignored, others) + ",labels=i32";
    }

    test_cross_entropy_loss_ids(std::array<int64_t, 4> ne, int ignored, bool back, int64_t others = 0) :
        ne(ne),
        ignored(ignored),
        back(back),
        others(others) {}

    ggml_tensor * build_graph(ggml_context * ctx) override {
        ggml_tensor * logits = ggml_new_tensor(ctx, GGML_TYPE_F32, 4, ne.data());
        ggml_tensor * batch  = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, ggml_nrows(logits) + others);
        ggml_tensor * labels = others ? ggml_view_1d(ctx, batch, ggml_nrows(logits), others / 2 * sizeof(int32_t)) : batch;
        ggml_set_name(logits, "logits");
        ggml_set_name(labels, "labels");
        ggml_tensor * out = nullptr;
        if (back) {
            ggml_tensor * grad = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 1);
            ggml_set_name(grad, "grad");
            out = ggml_cross_entropy_loss_back(ctx, grad, logits, labels);
        } else {
            ggml_set_param(logits);
            out = ggml_cross_entropy_loss(ctx, logits, labels);
        }
        if (others) {
            out->src[back ? 3 : 2] = batch;
        }
        ggml_set_name(out, "out");
        return out;
    }

    void initialize_tensors(ggml_context * ctx) override {
        std::mt19937 rng(ne[0] + ignored);
        for (ggml_tensor * t = ggml_get_first_tensor(ctx); t != nullptr; t = ggml_get_next_tensor(ctx, t)) {
            if (t->type != GGML_TYPE_I32) {
                const float range = back ? 10.0f : 100.0f; // as upstream's cases, for finite differences
                init_tensor_uniform(t, -range, range);
                continue;
            }
            if (ggml_is_view_op(t->op)) {
                continue;
            }
            std::vector<int32_t> labels(ggml_nelements(t));
            for (int32_t & label : labels) {
                label = (int) (rng() % 100) < ignored ? -1 : rng() % ne[0];
            }
            ggml_backend_tensor_set(t, labels.data(), 0, labels.size() * sizeof(int32_t));
        }
    }

    float grad_eps() override {
        return 1.0f;
    }

    bool grad_precise() override {
        return true;
    }
};

static void add_train_cases(std::vector<std::unique_ptr<test_case>> & test_cases) {
    for (const int64_t ne0 : { 1, 3, 33, 576, 2049 }) {
        for (const int nr1 : { 1, 5, 255, 4096 }) {
            test_cases.emplace_back(new test_repeat_back(GGML_TYPE_F32, { ne0, 1, 1, 1 }, { 1, nr1, 1, 1 }));
        }
    }
    test_cases.emplace_back(new test_repeat_back(GGML_TYPE_F32, { 1, 1, 1, 1 }, { 3001, 7, 3, 2 }));
    test_cases.emplace_back(new test_repeat_back(GGML_TYPE_F32, { 64, 300, 3, 1 }, { 1, 1, 3, 1 }));
    test_cases.emplace_back(new test_repeat_back(GGML_TYPE_F32, { 64, 1, 9, 1 }, { 1, 129, 1, 3 }));
    test_cases.emplace_back(new test_repeat_back(GGML_TYPE_F32, { 5, 4, 3, 2 }, { 3, 5, 7, 11 }));
    test_cases.emplace_back(new test_repeat_back(GGML_TYPE_F32, { 40, 2, 2, 2 }, { 1, 64, 2, 4 }, true));

    for (const int often : { 0, 50, 100 }) {
        test_cases.emplace_back(new test_get_rows_back_often(1, 70000, 33, often));
        test_cases.emplace_back(new test_get_rows_back_often(576, 320, 4096, often));
        test_cases.emplace_back(new test_get_rows_back_often(64, 32000, 3000, often));
        test_cases.emplace_back(new test_get_rows_back_often(257, 3, 1025, often));
    }

    for (const bool back : { false, true }) {
        for (const int ignored : { 0, 50, 100 }) {
            test_cases.emplace_back(new test_cross_entropy_loss_ids({ 10, 5, 4, 3 }, ignored, back));
            test_cases.emplace_back(new test_cross_entropy_loss_ids({ 1024, 33, 1, 1 }, ignored, back));
            test_cases.emplace_back(new test_cross_entropy_loss_ids({ 1025, 7, 3, 1 }, ignored, back));
            test_cases.emplace_back(new test_cross_entropy_loss_ids({ 32000, 65, 1, 1 }, ignored, back));
            test_cases.emplace_back(new test_cross_entropy_loss_ids({ 151937, 9, 1, 1 }, ignored, back));
            test_cases.emplace_back(new test_cross_entropy_loss_ids({ 33, 40, 1, 1 }, ignored, back, 3000));
            test_cases.emplace_back(new test_cross_entropy_loss_ids({ 8200, 5, 1, 1 }, ignored, back, 70));
        }
    }
    for (const int64_t nclasses : { 1, 33, 1024, 1025, 8192, 8193, 32000, 151936 }) {
        test_cases.emplace_back(new test_cross_entropy_loss(GGML_TYPE_F32, { nclasses, 17, 1, 1 }));
        test_cases.emplace_back(new test_cross_entropy_loss_back(GGML_TYPE_F32, { nclasses, 17, 1, 1 }));
    }
}

static void add_train_perf_cases(std::vector<std::unique_ptr<test_case>> & test_cases) {
    for (const int tokens : { 4096, 16384 }) {
        test_cases.emplace_back(new test_repeat_back(GGML_TYPE_F32, { 576, 1, 1, 1 }, { 1, tokens, 1, 1 }));
        test_cases.emplace_back(new test_get_rows_back_often(576, tokens, tokens, 0));
        test_cases.emplace_back(new test_get_rows_back_often(576, 32000, tokens, 10));
        for (const bool back : { false, true }) {
            test_cases.emplace_back(new test_cross_entropy_loss_ids({ 32000, tokens, 1, 1 }, 0, back));
        }
    }
}
