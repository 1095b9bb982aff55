# Builds FLASH_ATTN_BACK into ggml-base and tells every library that has a part of it which sources it was built from:
# ggml-flash-attn-back-source.h, written at build time from the files that the manifest beside this file lists, with their
# hashes beside it, whose digest it holds.

set(manifest ${CMAKE_CURRENT_LIST_DIR}/ggml-flash-attn-back.sha256)
file(STRINGS ${manifest} lines REGEX "^[^#]")
set(files)
set(listing "")
foreach (line IN LISTS lines)
    string(REGEX REPLACE "^[0-9a-f]+  " "" path ${line})
    set(file ${CMAKE_CURRENT_LIST_DIR}/../${path})
    if (NOT EXISTS ${file})
        set(file ${CMAKE_CURRENT_LIST_DIR}/../../${path}) # tests/ of a llama.cpp tree
    endif()
    list(APPEND files ${file})
    if (CMAKE_SCRIPT_MODE_FILE)
        file(SHA256 ${file} hash)
        string(APPEND listing "${hash}  ${path}\n")
    endif()
endforeach()

if (CMAKE_SCRIPT_MODE_FILE)
    string(SHA256 source "${listing}")
    get_filename_component(folder ${HEADER} DIRECTORY)
    file(WRITE ${folder}/ggml-flash-attn-back-source.sha256 "${listing}")
    file(WRITE ${HEADER} "#define GGML_FLASH_ATTN_BACK_SOURCE \"${source}\"\n")
    return()
endif()

set(include_dir ${CMAKE_CURRENT_BINARY_DIR}/ggml-flash-attn-back)
set(header ${include_dir}/ggml-flash-attn-back-source.h)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${manifest})
add_custom_command(OUTPUT ${header}
    COMMAND ${CMAKE_COMMAND} -DHEADER=${header} -P ${CMAKE_CURRENT_LIST_FILE}
    DEPENDS ${files} ${manifest} ${CMAKE_CURRENT_LIST_FILE}
    COMMENT "Digest of the FLASH_ATTN_BACK sources"
    VERBATIM)
add_custom_target(ggml-flash-attn-back-source DEPENDS ${header})

target_sources(ggml-base PRIVATE ggml-flash-attn-back.c ggml-flash-attn-back-impl.h ../include/ggml-flash-attn-back.h)
add_dependencies(ggml-base ggml-flash-attn-back-source)
set_source_files_properties(ggml-flash-attn-back.c ggml-cpu/flash-attn-back.cpp PROPERTIES INCLUDE_DIRECTORIES ${include_dir})

set(GGML_CUDA_FATTN_BACK_PATHS "hopper;mma;rows" CACHE STRING "Kernel paths of FLASH_ATTN_BACK to build, rows among them")
foreach (path IN LISTS GGML_CUDA_FATTN_BACK_PATHS)
    if (NOT path MATCHES "^(hopper|mma|rows)$")
        message(FATAL_ERROR "GGML_CUDA_FATTN_BACK_PATHS names '${path}'; the paths are hopper, mma and rows")
    endif()
endforeach()
if (NOT "rows" IN_LIST GGML_CUDA_FATTN_BACK_PATHS)
    message(FATAL_ERROR "GGML_CUDA_FATTN_BACK_PATHS lacks rows, which takes what the other paths do not")
endif()

if (TARGET ggml-rpc)
    add_dependencies(ggml-rpc ggml-flash-attn-back-source)
    set_source_files_properties(ggml-rpc/ggml-rpc.cpp TARGET_DIRECTORY ggml-rpc PROPERTIES INCLUDE_DIRECTORIES ${include_dir})
endif()

# the HIP and MUSA backends compile the files of the CUDA backend
foreach (target ggml-cuda ggml-hip ggml-musa)
    if (TARGET ${target})
        add_dependencies(${target} ggml-flash-attn-back-source)
        file(GLOB sources ${CMAKE_CURRENT_LIST_DIR}/ggml-cuda/fattn-back*.cu)
        set_source_files_properties(${sources} TARGET_DIRECTORY ${target} PROPERTIES INCLUDE_DIRECTORIES ${include_dir})
        set(left_out)
        foreach (path hopper mma)
            if (NOT path IN_LIST GGML_CUDA_FATTN_BACK_PATHS)
                list(APPEND left_out ${path})
                string(TOUPPER FATTN_BACK_NO_${path} definition)
                set_property(SOURCE ${CMAKE_CURRENT_LIST_DIR}/ggml-cuda/fattn-back.cu TARGET_DIRECTORY ${target}
                    APPEND PROPERTY COMPILE_DEFINITIONS ${definition})
            endif()
        endforeach()
        if (left_out STREQUAL "hopper;mma")
            list(APPEND left_out prep) # of both
        endif()
        foreach (part IN LISTS left_out)
            file(GLOB sources ${CMAKE_CURRENT_LIST_DIR}/ggml-cuda/fattn-back-${part}*.cu)
            set_source_files_properties(${sources} TARGET_DIRECTORY ${target} PROPERTIES HEADER_FILE_ONLY ON)
        endforeach()
    endif()
endforeach()
