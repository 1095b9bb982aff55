# libllama of a llama.cpp tree, which training needs: cmake --build build/cpu --target llama

function(llama_add_compile_flags) # warnings and sanitizers, which this build sets for itself
endfunction()

file(STRINGS ${tree}/CMakeLists.txt lines REGEX "^set\\(LLAMA_VERSION_(MAJOR|MINOR|PATCH) ")
foreach (line IN LISTS lines)
    string(REGEX MATCH "(LLAMA_VERSION_[A-Z]+) ([0-9]+)" line ${line})
    set(${CMAKE_MATCH_1} ${CMAKE_MATCH_2})
endforeach()
set(LLAMA_VERSION_BASE ${LLAMA_VERSION_MAJOR}.${LLAMA_VERSION_MINOR}.${LLAMA_VERSION_PATCH})
set(LLAMA_VERSION      ${LLAMA_VERSION_BASE})
set(LLAMA_INSTALL_VERSION 0.0.0) # of older trees, which have no other
get_filename_component(LLAMA_BUILD_COMMIT ${tree} NAME)
add_subdirectory(${tree}/src llama EXCLUDE_FROM_ALL)

add_executable(flash-attn-train EXCLUDE_FROM_ALL examples/train/flash-attn-train.cpp)
target_include_directories(flash-attn-train PRIVATE ${tree}/src)
target_link_libraries(flash-attn-train PRIVATE llama)

if (GGML_RPC)
    add_executable(ggml-rpc-server EXCLUDE_FROM_ALL ${tree}/tools/rpc/rpc-server.cpp)
    target_link_libraries(ggml-rpc-server PRIVATE ggml)
endif()
