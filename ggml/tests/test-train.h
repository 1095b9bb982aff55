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
}

static void add_train_perf_cases(std::vector<std::unique_ptr<test_case>> & test_cases) {
    for (const int tokens : { 4096, 16384 }) {
        test_cases.emplace_back(new test_repeat_back(GGML_TYPE_F32, { 576, 1, 1, 1 }, { 1, tokens, 1, 1 }));
        test_cases.emplace_back(new test_get_rows_back_often(576, tokens, tokens, 0));
        test_cases.emplace_back(new test_get_rows_back_often(576, 32000, tokens, 10));
    }
}
